"""Builds an engine: weights, cache, runner and scheduler, with every graph captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from tiercel.cache.manager import CacheManager, GroupBlocks
from tiercel.cache.pool import CachePool
from tiercel.cache.spec import group_specs, slot_layout
from tiercel.config import num_head_drafts
from tiercel.engine.engine import Engine
from tiercel.engine.memory import Demand, MemoryBudget, cache_blocks
from tiercel.engine.options import dtype_name, dtypes_from
from tiercel.engine.peers import ALONE, Peers
from tiercel.engine_config import EngineConfig
from tiercel.errors import OutOfMemoryError
from tiercel.models.config import ModelConfig
from tiercel.models.footprint import cache_bytes, gpus_that_fit, weight_footprint
from tiercel.models.fused_paths import step_copy_bytes
from tiercel.models.model import Model, model_class
from tiercel.models.sharding import Sharding, sharding_kind
from tiercel.models.source import ModelSource
from tiercel.models.weights import WeightReader
from tiercel.ops.prepare_step import SlotLayout
from tiercel.parallel import Group
from tiercel.runner.graph_capture import GraphRecorder
from tiercel.runner.joint_runner import JointRunner
from tiercel.runner.row_state import Rows
from tiercel.runner.runner import ModelRunner
from tiercel.runner.sampler import Sampler
from tiercel.runner.step_inputs import BatchBuilder
from tiercel.scheduler.joint import JointScheduler
from tiercel.scheduler.scheduler import Scheduler
from tiercel.scheduler.step_budget import StepBudget
from tiercel.spec.drafter_state import Proposer
from tiercel.spec.hybrid import HybridProposer
from tiercel.spec.mtp import MtpProposer
from tiercel.spec.ngram import NgramProposer
from tiercel.spec.policy import MIN_ACCEPTANCE, DraftPolicy
from tiercel.text.tokenizer import Tokenizer

# Share of a GPU's memory that weights with dense copies of packed ones may take; the remaining
# memory is for the cache.
COPIES_SHARE: Final = 0.5
# The same for packed weights with those of the fused decode step, where it has a copy of its own.
STEP_COPY_SHARE: Final = 0.7


def sharding_of(config: EngineConfig, rank: int) -> Sharding:
    """The place of a rank among those that share the model."""
    return _kind_of(config).of(rank, config.tensor_parallel_size)


def _kind_of(config: EngineConfig) -> Sharding:
    return sharding_kind(
        expert_parallel=config.expert_parallel,
        data_parallel_attention=config.data_parallel_attention,
    )


def _make_runner(
    model: Model, layout: SlotLayout, config: EngineConfig, tokenizer: Tokenizer, group: Group
) -> ModelRunner:
    """The rows, the sampler and the proposer, around a model."""
    spec, vocab_size = config.spec, model.config.vocab_size
    # Drafts may have positions after those of the longest text.
    max_blocks = -(-(config.max_model_len + spec.max_drafts) // config.block_size)
    rows = Rows(
        config.max_num_seqs,
        config.max_model_len,
        len(layout.tokens_per_entry),
        max_blocks,
        config.device,
        spec.max_drafts,
    )
    sampler = Sampler(
        [*tokenizer.unused_ids, *range(tokenizer.vocab_size, vocab_size)],
        vocab_size,
        rows,
        lambda word: [tokenizer.encode(word), tokenizer.encode(" " + word)],
        MIN_ACCEPTANCE[config.device.type],
    )
    batches = BatchBuilder(rows, layout, config.num_schedulers)
    proposer = _make_proposer(model, rows, batches, sampler, config)
    if config.data_parallel_attention:
        return JointRunner(model, rows, sampler, config, batches, proposer, group)
    return ModelRunner(model, rows, sampler, config, batches, proposer)


def _make_proposer(
    model: Model, rows: Rows, batches: BatchBuilder, sampler: Sampler, config: EngineConfig
) -> Proposer | None:
    """The proposer of drafts; None without speculation."""
    spec, state = config.spec, rows.drafter_state
    if spec.method == "off":
        return None
    if not spec.has_head:
        return NgramProposer(state, spec)
    assert model.draft_head is not None, "resolve_config has checked"
    mtp = MtpProposer(
        state,
        model.draft_head,
        sampler.is_banned,
        num_head_drafts(spec),
        partial(batches.draft_batch, config.max_model_len + spec.max_drafts),
    )
    return mtp if spec.method == "mtp" else HybridProposer(state, mtp, spec)


def _capture(runner: ModelRunner, progress: Callable[[str, int, int], None] | None) -> None:
    """Prepare the steps of fixed sizes: capture their graphs, if there are any."""
    config = runner.config
    recorder = GraphRecorder(config.device) if config.cuda_graphs else None
    runner.prompt_steps.capture(
        recorder, None if progress is None else partial(progress, "Capturing prompts")
    )
    if recorder is not None:
        runner.decode_steps.capture(
            recorder, None if progress is None else partial(progress, "Capturing")
        )
        recorder.finish()


def _find_room_for_copies(
    source: ModelSource, config: EngineConfig, budget: MemoryBudget, peers: Peers
) -> tuple[bool, bool]:
    """Whether packed weights keep dense copies, and one for whole decode steps, on every rank.

    Raises:
        OutOfMemoryError: weights and one sequence do not fit even without them.
    """
    device = config.device
    sharding = sharding_of(config, peers.rank)
    measure = partial(
        weight_footprint,
        source,
        device_type=device.type,
        has_draft_head=config.spec.has_head,
        sharding=sharding,
    )
    needed, *others = (
        Demand(
            measure(dtype=name),
            config.max_model_len,
            partial(_sequence_bytes, source.config, config, name, peers.rank),
            config.tensor_parallel_size,
        )
        for name in dtypes_from(config.dtype, device)
    )
    budget.check(needed, others, partial(_sizes_that_fit, source, config))
    name = dtype_name(config.dtype)
    left = peers.least("memory for weights", budget.left())
    has_dense = measure(dtype=name, dense_copies=True).nbytes <= COPIES_SHARE * left
    return has_dense, (
        has_dense
        or measure(dtype=name).nbytes + step_copy_bytes(source, sharding) <= STEP_COPY_SHARE * left
    )


def _sizes_that_fit(source: ModelSource, config: EngineConfig, available: int) -> list[int]:
    """Numbers of GPUs that could share a model, each with so many bytes; none on a CPU."""
    if config.device.type == "cpu":
        return []
    return gpus_that_fit(
        source,
        dtype_name(config.dtype),
        config.max_model_len,
        available,
        kind=_kind_of(config),
        kv_dtype=config.model_options.kv_dtype,
        has_draft_head=config.spec.has_head,
    )


def _sequence_bytes(
    shape: ModelConfig, config: EngineConfig, dtype: str, rank: int, num_tokens: int
) -> int:
    """Bytes of the cache of one sequence, its draft head's too if that is loaded."""
    if not config.spec.has_head:
        shape = replace(shape, num_mtp_layers=0)
    kv_dtype = config.model_options.kv_dtype
    sharding = sharding_of(config, rank)
    return cache_bytes(shape, num_tokens, dtype, config.device.type, kv_dtype, sharding)


def build_engine(
    source: ModelSource,
    config: EngineConfig,
    tokenizer: Tokenizer,
    progress: Callable[[str, int, int], None] | None = None,
    peers: Peers = ALONE,
) -> Engine:
    """Load a model, make room for its cache, and capture its decode graphs.

    Args:
        source: a checked file.
        config: resolved.
        tokenizer: of the model.
        progress: called with (what, done, total).
        peers: the other ranks.

    Raises:
        OutOfMemoryError: weights or cache do not fit; the message says what was needed and what to
            lower.
    """
    device = config.device
    budget = MemoryBudget(device, config.gpu_memory_utilization, num_engines=config.num_replicas)
    dense_copies, step_copy = _find_room_for_copies(source, config, budget, peers)
    load = None if progress is None else partial(progress, "Loading")
    sharding = sharding_of(config, peers.rank)
    reader = WeightReader(
        source, device, load, dense_copies=dense_copies, step_copy=step_copy, sharding=sharding
    )
    try:
        model = _load_weights(source, config, reader, peers)
        groups = group_specs(model.cache_specs())
        layout = slot_layout(groups, config.block_size)
        runner = _make_runner(model, layout, config, tokenizer, peers.group)

        def make_pools(sizes: Sequence[int]) -> list[CachePool]:
            return [
                CachePool(group, size, config.block_size, str(device))
                for group, size in zip(groups, sizes, strict=True)
            ]

        runner.bind_pools(make_pools([1] * len(groups)))
        budget.reserve(runner.measure_steps())
        spare_places = max(0, num_head_drafts(config.spec) - 1)
        most_places = config.max_num_batched_tokens + spare_places
        sizes = cache_blocks(
            groups,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=most_places,
            available=peers.least("memory for the cache", budget.left()),
        )
        runner.bind_pools(make_pools(sizes))
        _capture(runner, progress)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"{device} ran out of memory while loading: {str(error).splitlines()[0]}",
            hint="Use a smaller model, or lower max_model_len.",
        ) from error
    policy = None
    if config.spec.max_drafts:
        policy = DraftPolicy(_agreed_costs(runner, peers), spare_places)
    budget_of_steps = StepBudget(config.max_num_batched_tokens, is_timed=config.timed_steps)
    blocks = [GroupBlocks(size, g.spec.window) for g, size in zip(groups, sizes, strict=True)]
    schedulers = [
        Scheduler(
            CacheManager(
                blocks, config.block_size, most_places, has_prefix_cache=config.prefix_cache
            ),
            config.max_num_seqs,
            budget_of_steps,
            policy=policy,
        )
        for _ in range(config.num_schedulers)
    ]
    joint = JointScheduler(schedulers) if config.data_parallel_attention else schedulers[0]
    return peers.engine(joint, runner, config)


def _load_weights(
    source: ModelSource, config: EngineConfig, reader: WeightReader, peers: Peers
) -> Model:
    """The model, with its draft head if that is used."""
    num_mtp_layers = source.config.num_mtp_layers if config.spec.has_head else 0
    return model_class(source.family)(
        replace(source.config, num_mtp_layers=num_mtp_layers),
        reader,
        config.dtype,
        config.max_model_len + config.spec.max_drafts,
        config.model_options,
        group=peers.group,
    )


def _agreed_costs(runner: ModelRunner, peers: Peers) -> list[tuple[int, float]]:
    """(rows, c) for sizes of steps, as rank 0 has measured them; every rank runs the replays."""
    costs = runner.decode_steps.verify_costs()
    agreed = peers.first("costs of drafts", [cost for _, cost in costs])
    return [(size, cost) for (size, _), cost in zip(costs, agreed, strict=True)]
