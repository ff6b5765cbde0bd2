"""From options to a loaded engine: the one path of `LLM`, `AsyncLLM` and the engine process.

Find the file, check it, resolve the options against it, load it.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import torch

from tiercel import env
from tiercel.config import LoadOptions, resolve_model_options, resolve_spec
from tiercel.engine.build import build_engine
from tiercel.engine.engine import Engine
from tiercel.engine.memory import MemoryBudget
from tiercel.engine.options import (
    dtype_name,
    resolve_count,
    resolve_device,
    resolve_dtype,
    resolve_own_device,
    resolve_ranks,
    resolve_share,
    resolve_threads,
)
from tiercel.engine.peers import ALONE, Peers
from tiercel.engine.warm_up import warm_up
from tiercel.engine_config import EngineConfig
from tiercel.errors import ArgumentError
from tiercel.faults import Faults
from tiercel.grammar.matchers import Matchers
from tiercel.kernels.native.library import describe_library, native_refusal
from tiercel.loader.stamps import read_stamp
from tiercel.machine import check_platform, usable_cpus
from tiercel.models.footprint import cache_bytes, weight_footprint
from tiercel.models.model import model_class
from tiercel.models.shard_check import check_sharding
from tiercel.models.sharding import Sharding, sharding_kind
from tiercel.models.source import ModelSource, find_source
from tiercel.request.inputs import InputProcessor
from tiercel.request.score_inputs import ScoreInputs
from tiercel.text.tokenizer import Tokenizer
from tiercel.version import __version__

MAX_SEQS = {"cpu": 16, "cuda": 256}
# A CPU gains nothing from longer chunks; a GPU needs some thousand tokens to be bound by
# arithmetic.
MAX_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
# Rows of tokens, block tables and the index of n-grams grow with it, for each request that may run.
DEFAULT_CONTEXT: Final = 131_072

_LOG: Final = logging.getLogger(__name__)
_IMPORTER: Final = os.getpid()  # not that of a fork
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that runs.

    Attributes:
        source: the checked file.
        config: the resolved options.
        tokenizer: of the model.
        engine: with weights and cache.
        matchers: of requests with a grammar.
        faults: those that ``TIERCEL_FAULTS`` requests.
        peers: the other ranks; they end with `close`.
    """

    source: ModelSource
    config: EngineConfig
    tokenizer: Tokenizer
    engine: Engine
    matchers: Matchers
    faults: Faults
    peers: Peers = ALONE

    def inputs(self) -> InputProcessor:
        """The input processor, which makes its requests."""
        return InputProcessor(
            self.tokenizer,
            vocab_size=self.source.config.vocab_size,
            max_position=self.source.config.max_position,
            max_model_len=self.config.max_model_len,
            seed=self.config.seed,
        )

    def score_inputs(self, inputs: InputProcessor) -> ScoreInputs:
        """The processor that makes its scoring requests."""
        return ScoreInputs(
            inputs,
            self.tokenizer,
            max_model_len=self.config.max_model_len,
            max_step_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            packs_items=self.config.packs_items,
        )


def load_model(
    model: str | Path | ModelSource | None,
    options: LoadOptions,
    report: Report | None,
    peers: Peers = ALONE,
) -> LoadedModel:
    """Find, check and load a model on one rank.

    Args:
        model: see `LLM`; replaces `options.model`.
        options: all other options.
        report: called with (what, done, total) in bytes while fetching and loading.
        peers: the other ranks; see `ipc/ranks.py` for starting them.

    Raises:
        ModelNotFoundError, ModelFormatError, UnsupportedModelError: the model.
        ArgumentError: an option, or faults that are not enabled.
        OutOfMemoryError: weights, or the cache of one sequence, do not fit.
        InstallationError: not on this platform.
    """
    check_platform()
    faults = Faults.parse(env.faults(), is_enabled=options.enable_fault_injection, rank=peers.rank)
    source = open_model(model, options, report)
    config = resolve_config(source, options, peers.rank)
    peers.check(facts_of(source, config, has_one_host=not options.ranks_per_host))
    if config.device.type == "cuda":
        torch.cuda.set_device(config.device)  # on which Triton launches
    peers.connect(config.device)
    torch.set_num_threads(_torch_threads(config.threads))
    if config.device.type == "cpu":
        _LOG.log(_native_level(), "Native library: %s", describe_library(config.threads))
    if not config.packs_items:
        _LOG.info("%s packs no items: each is scored by itself after its prompt.", source.path.name)
    tokenizer = source.tokenizer(env.cache_dir() / "tokenizers")
    engine = build_engine(source, config, tokenizer, report, peers)
    for part in source.files.parts:  # what was rearranged or copied is not read again
        part.release_pages()
    peers.least("loaded", 1)
    # The other ranks take the requests of rank 0's warm-up.
    if peers.rank == 0 and (options.warm_up or config.device.type == "cuda"):
        if report is not None:
            report("Warming up", 0, 0)
        warm_up(engine, source.config.vocab_size)
    if gc.isenabled():  # else whoever paused it decides
        gc.collect()  # the garbage of loading, so that no collection delays the first request
    peers.begin()
    if peers.rank == 0:  # elsewhere they begin with the message that the warm-up is over
        engine.runner.faults = faults
    matchers = peers.matchers(tokenizer, source.config.vocab_size)
    return LoadedModel(source, config, tokenizer, engine, matchers, faults, peers)


def _torch_threads(count: int) -> int:
    """Threads of PyTorch's operators. Those of OpenMP do not survive a fork: they are waited for.

    count: of the engine; the native library's own threads are started anew after a fork.
    """
    if os.getpid() == _IMPORTER:
        return count
    _LOG.info("PyTorch uses one thread: this process is a fork of one that may have used more.")
    return 1


def _native_level() -> int:
    """How loudly to name the native library: a slow path that nobody asked for is a warning."""
    if not native_refusal():
        return logging.DEBUG
    return logging.WARNING if env.has_native() else logging.INFO


def open_model(
    model: str | Path | ModelSource | None, options: LoadOptions, report: Report | None
) -> ModelSource:
    """The checked file of a model, unless it was opened already; see `find_source`."""
    if isinstance(model, ModelSource):
        return model
    return find_source(model, offline=options.offline, report=report)


def facts_of(
    source: ModelSource, config: EngineConfig, *, has_one_host: bool = True
) -> dict[str, str]:
    """What all ranks must have in common, for a comparison; copies of a file differ in time."""
    device = config.device
    is_cpu = device.type == "cpu"
    facts = {
        "Tiercel": __version__,
        "PyTorch": str(torch.__version__),
        "device": "cpu" if is_cpu else torch.cuda.get_device_name(device),
        "native library": describe_library(config.threads) if is_cpu else "",
        "switches": str(env.switches()),
        "options": str(replace(config, device=torch.device(device.type))),
    }
    for path in source.file_paths:
        stamp = read_stamp(path)
        written = f", written at {stamp.mtime_ns} ns" if has_one_host else ""
        facts[path.name] = f"{stamp.num_bytes} bytes{written}"
    return facts


def resolve_config(source: ModelSource, options: LoadOptions, rank: int = 0) -> EngineConfig:
    """Check options against the model and this machine; fill in defaults.

    Args:
        source: of the model.
        options: as given, or those of `settled`.
        rank: of this process.

    Raises:
        ArgumentError: a value that cannot be, naming the option or the environment variable.
    """
    env.switches()  # also those of another device: a wrong value is a mistake all the same
    device = resolve_device(options.device)
    num_ranks = resolve_ranks(options.tensor_parallel_size, device, options.ranks_per_host)
    sharding = _resolve_sharding(source, options, num_ranks).of(rank, num_ranks)
    device = resolve_own_device(options, device, num_ranks, rank)
    spec = resolve_spec(options.spec, options.num_spec_tokens)
    if spec.has_head and not source.config.num_mtp_layers:
        raise ArgumentError(
            f"spec={spec.method!r}: "
            f"{source.config.no_draft_head or f'{source.path.name} has no layers for it'}.",
            hint="Use ngram, which any model can.",
        )
    model = model_class(source.family)
    model_options = resolve_model_options(options.kv_dtype, options.numerics)
    model.check_options(source.config, model_options)
    longest = source.config.max_position
    max_model_len = resolve_count(
        "max_model_len", options.max_model_len, min(longest, DEFAULT_CONTEXT), longest
    )
    utilization = resolve_share(options.gpu_memory_utilization)
    dtype = options.dtype
    if dtype == "auto":
        dtype = source.family.auto_dtypes.get(device.type, dtype)

    def fits(dtype: str) -> bool:
        needed = weight_footprint(
            source, dtype, device.type, has_draft_head=spec.has_head, sharding=sharding
        ).nbytes
        needed += cache_bytes(
            source.config, max_model_len, dtype, device.type, model_options.kv_dtype, sharding
        )
        budget = MemoryBudget(device, utilization, num_engines=options.num_replicas)
        return needed <= budget.left()

    max_num_seqs, max_num_batched_tokens = _resolve_sizes(
        options, device, spec.max_drafts, model.exact_tokens
    )
    return EngineConfig(
        device=device,
        dtype=resolve_dtype(dtype, device, source.format, fits),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=model.block_size,
        gpu_memory_utilization=utilization,
        prefix_cache=env.has_prefix_cache(),
        cuda_graphs=device.type == "cuda" and env.has_cuda_graphs(),
        overlap=env.has_overlap(default=device.type == "cuda"),
        sync_debug=device.type == "cuda" and env.is_sync_debug(),
        spec=spec,
        packs_items=model.packs_items,
        model_options=model_options,
        seed=resolve_count("seed", options.seed, 0, 2**63 - 1, low=-(2**63)),
        timed_steps=options.timed_steps and device.type == "cpu",
        threads=resolve_threads(options.threads, max(1, usable_cpus() // options.num_replicas)),
        tensor_parallel_size=num_ranks,
        expert_parallel=options.expert_parallel or options.data_parallel_attention,
        data_parallel_attention=options.data_parallel_attention,
        num_replicas=options.num_replicas,
    )


def _resolve_sharding(source: ModelSource, options: LoadOptions, num_ranks: int) -> Sharding:
    """How ranks share the model."""
    kind = sharding_kind(
        expert_parallel=options.expert_parallel,
        data_parallel_attention=options.data_parallel_attention,
    )
    check_sharding(source, num_ranks, kind)
    return kind


def _resolve_sizes(
    options: LoadOptions, device: torch.device, max_drafts: int, exact_tokens: int | None
) -> tuple[int, int]:
    """The most requests that run together, and the most tokens of a step.

    exact_tokens: of the model, see `ModelClass`.
    """
    num_seqs = resolve_count("max_num_seqs", options.max_num_seqs, MAX_SEQS[device.type], 4096)
    num_tokens = resolve_count(
        "max_num_batched_tokens",
        options.max_num_batched_tokens,
        MAX_BATCHED_TOKENS[device.type],
        2**20,
    )
    if exact_tokens is None or device.type == "cpu" or not env.is_exact():
        return num_seqs, num_tokens
    most = max(1, exact_tokens // (1 + max_drafts))
    return min(num_seqs, most), min(num_tokens, exact_tokens)


def settled(source: ModelSource, options: LoadOptions, config: EngineConfig) -> LoadOptions:
    """The options with which other ranks resolve to the same settings, whatever they measure."""
    return msgspec.structs.replace(
        options,
        model=str(source.path),
        offline=True,
        device=config.device.type,
        dtype=dtype_name(config.dtype),
        threads=config.threads,
    )
