"""Options of a model: what a caller gives arrives, within bounds that are named where passed."""

import asyncio
import inspect
from dataclasses import replace

import pytest
import torch

from tests.dsv4_files import TINY as TINY_V4
from tests.engine.toy_model import ToyModel
from tests.tiny_llm import LLAMA
from tiercel import async_llm, llm
from tiercel.config import LoadOptions, ModelOptions
from tiercel.engine import load as build
from tiercel.engine.load import resolve_config
from tiercel.engine.options import resolve_own_device, resolve_ranks, resolve_threads
from tiercel.errors import ArgumentError
from tiercel.llm import LLM
from tiercel.models.decoder import Decoder
from tiercel.models.deepseek_v4_model import DeepseekV4
from tiercel.models.source import open_source

CONTEXT = 2048  # of the tiny model
# Each option with a value that is not its default.
GIVEN = {
    "device": "cpu",
    "dtype": "bfloat16",
    "kv_dtype": "fp8",
    "numerics": "native",
    "max_model_len": 77,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 19,
    "gpu_memory_utilization": 0.25,
    "seed": -5,
    "spec": "ngram",
    "num_spec_tokens": 4,
    "threads": 3,
    "tensor_parallel_size": 2,
    "expert_parallel": True,
    "data_parallel_attention": True,
    "offline": True,
}


class SeenError(Exception):
    """Stops loading."""


@pytest.mark.parametrize("module", [llm, async_llm], ids=lambda module: module.__name__)
def test_every_option_reaches_the_loader(monkeypatch, module):
    kind = module.LLM if module is llm else module.AsyncLLM
    seen = []

    def load(model, options, progress):
        seen.append((model, options, progress))
        raise SeenError

    monkeypatch.setattr(module, "load_ranks", load)
    names = set(inspect.signature(kind.__init__).parameters) - {"self", "model", "progress"}
    assert names == GIVEN.keys()
    for options in ({}, GIVEN, *({name: value} for name, value in GIVEN.items())):
        with pytest.raises(SeenError):
            kind("m", progress=print, **options)
        expected = LoadOptions(**options, timed_steps=module is async_llm)
        assert seen.pop() == ("m", expected, print)
    defaults = LoadOptions()
    assert all(getattr(defaults, name) != value for name, value in GIVEN.items())


def resolve(**options):
    return resolve_config(open_source(LLAMA), LoadOptions(**({"device": "cpu"} | options)))


def test_a_long_context_must_be_requested():
    """Rows and the index of n-grams grow with the context, for each request that may run."""
    source = open_source(LLAMA)
    long = replace(source, config=replace(source.config, max_position=1_048_576))

    def length(source, **options):
        return resolve_config(source, LoadOptions(device="cpu", **options)).max_model_len

    assert length(source) == CONTEXT
    assert length(long) == 131_072
    assert length(long, max_model_len=1_048_576) == 1_048_576
    with pytest.raises(ArgumentError, match="max_model_len=1048577") as caught:
        length(long, max_model_len=1_048_577)
    assert caught.value.hint == "Use 1 to 1048576."


def test_options_of_the_model_reach_it():
    """Those that its class accepts; a dense model has the defaults alone."""
    source = open_source(LLAMA)
    assert resolve().model_options == ModelOptions()
    family = replace(source.family, model=f"{ToyModel.__module__}:ToyModel")
    options = LoadOptions(device="cpu", kv_dtype="fp8", numerics="native")
    config = resolve_config(replace(source, family=family), options)
    assert config.model_options == ModelOptions("fp8", "native")
    with LLM(replace(source, family=family), device="cpu", dtype="float32", kv_dtype="bf16") as llm:
        assert llm._engine.runner.model.options == ModelOptions("bf16")


def test_time_bounds_steps_where_it_was_requested_and_on_a_cpu_alone(monkeypatch):
    assert not resolve().timed_steps
    assert resolve(timed_steps=True).timed_steps
    monkeypatch.setattr(build, "resolve_device", lambda _: torch.device("cuda:0"))
    assert not resolve(timed_steps=True).timed_steps


def test_exact_steps_are_as_small_as_the_bits_of_a_model_allow(monkeypatch):
    """On a GPU; a dense model has exact kernels for any number of tokens."""
    v4 = open_source(TINY_V4)
    given = {"dtype": "bfloat16", "max_num_seqs": 64, "num_spec_tokens": 3}

    def sizes(source, **options):
        config = resolve_config(source, LoadOptions(**(given | options)))
        return config.max_num_batched_tokens, config.max_num_seqs

    monkeypatch.setenv("TIERCEL_EXACT", "1")
    assert sizes(v4, device="cpu") == (2048, 64)
    monkeypatch.setattr(build, "resolve_device", lambda _: torch.device("cuda:0"))
    most = DeepseekV4.exact_tokens
    assert sizes(v4) == (most, most)
    assert sizes(v4, spec="ngram") == (most, most // 4)
    assert sizes(v4, max_num_batched_tokens=5, max_num_seqs=2) == (5, 2)
    assert sizes(open_source(LLAMA))[1] == 64
    monkeypatch.delenv("TIERCEL_EXACT")
    assert sizes(v4)[1] == 64


def test_options_become_the_configuration(monkeypatch):
    monkeypatch.setenv("TIERCEL_CPU_RANKS", "1")
    # No tensor of the tiny model is large enough for two.
    monkeypatch.setattr(build, "check_sharding", lambda *_, **__: None)
    dense = {"kv_dtype": "auto", "numerics": "exact"}  # see `test_options_of_the_model_reach_it`
    config = resolve(**(GIVEN | dense))
    assert (config.device, config.dtype) == (torch.device("cpu"), torch.bfloat16)
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "seed"):
        assert getattr(config, name) == GIVEN[name]
    assert (config.gpu_memory_utilization, config.threads) == (0.25, 3)
    assert (config.spec.method, config.spec.max_drafts) == ("ngram", 4)
    assert config.block_size == Decoder.block_size == 64
    assert (config.tensor_parallel_size, config.expert_parallel) == (2, True)
    assert (config.data_parallel_attention, config.num_schedulers) == (True, 2)


def test_defaults():
    config = resolve()
    assert (config.max_model_len, config.max_num_seqs) == (CONTEXT, 16)
    assert (config.max_num_batched_tokens, config.gpu_memory_utilization) == (2048, 0.9)
    assert (config.seed, config.spec.max_drafts) == (0, 0)
    assert (config.prefix_cache, config.overlap) == (True, False)
    assert (config.cuda_graphs, config.sync_debug) == (False, False)
    assert (config.tensor_parallel_size, config.expert_parallel) == (1, False)
    assert (config.data_parallel_attention, config.num_schedulers) == (False, 1)
    assert resolve(spec="ngram").spec.max_drafts == 5
    assert resolve(spec="ngram", num_spec_tokens=0).spec.method == "off"


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("max_model_len", 1, CONTEXT),
        ("max_num_seqs", 1, 4096),
        ("max_num_batched_tokens", 1, 2**20),
        ("seed", -(2**63), 2**63 - 1),
        ("num_spec_tokens", 0, 15),
    ],
)
def test_bounds_are_allowed_and_what_is_beyond_is_not(name, low, high):
    for value in (low, high):
        resolve(spec="ngram", **{name: value})
    for value in (low - 1, high + 1):
        with pytest.raises(ArgumentError, match=f"{name}={value} is out of range") as caught:
            resolve(spec="ngram", **{name: value})
        assert caught.value.hint == f"Use {low} to {high}."


def test_switches_of_the_environment(monkeypatch):
    for name, field in (("PREFIX_CACHE", "prefix_cache"), ("OVERLAP", "overlap")):
        for text, expected in (("0", False), ("1", True)):
            monkeypatch.setenv(f"TIERCEL_{name}", text)
            assert getattr(resolve(), field) is expected


@pytest.mark.parametrize("value", [0, -1, 1025, 1.5, "2", True])
def test_threads_out_of_range(value):
    with pytest.raises(ArgumentError, match=r"threads=.* is out of range") as caught:
        resolve(threads=value)
    assert caught.value.hint == "Use 1 to 1024."


def test_threads_are_those_of_pytorch_within_what_may_be_used(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    assert [resolve_threads(None, usable) for usable in (1, 4, 6, 64)] == [1, 4, 6, 6]
    assert resolve_threads(9, 4) == 9, "what was requested wins"
    monkeypatch.setattr(build, "usable_cpus", lambda: 4)
    assert resolve().threads == 4


@pytest.mark.parametrize("kind", [llm.LLM, async_llm.AsyncLLM], ids=lambda kind: kind.__name__)
def test_threads_reach_pytorch(monkeypatch, kind):
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    loaded = kind(LLAMA, device="cpu", threads=2)
    asyncio.run(loaded.close()) if kind is async_llm.AsyncLLM else loaded.close()
    assert seen == [2]


def test_ranks_need_gpus_of_their_own(monkeypatch):
    cpu, first, second = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    assert resolve_ranks(1, cpu) == resolve_ranks(1, second) == 1
    with pytest.raises(ArgumentError, match="needs 2 GPUs, but the device is the CPU"):
        resolve_ranks(2, cpu)
    monkeypatch.setenv("TIERCEL_CPU_RANKS", "1")
    assert resolve_ranks(2, cpu) == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    assert resolve_ranks(4, first) == 4
    with pytest.raises(ArgumentError, match=r"=8: this machine has 6 GPU\(s\)") as caught:
        resolve_ranks(8, first)
    assert caught.value.hint == "Use up to 4."
    assert resolve_ranks(16, first, 4) == 16, "the others are on other hosts"
    with pytest.raises(ArgumentError, match=r"=16: this machine has 6 GPU\(s\)"):
        resolve_ranks(16, first, 8)
    with pytest.raises(ArgumentError, match="begins at the first GPU, but the device is cuda:1"):
        resolve_ranks(2, second)
    for count in (3, 6, 48):
        with pytest.raises(ArgumentError, match=f"={count} is not a power of two"):
            resolve_ranks(count, first)
    for count in (0, -2, 128, 2.0, "2", True):
        with pytest.raises(ArgumentError, match="tensor_parallel_size="):
            resolve_ranks(count, first)


def test_each_engine_has_gpus_of_its_own(monkeypatch):
    cpu, first, second = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)

    def own(replica, num_replicas, num_ranks, device=first, rank=0, per_host=0):
        options = LoadOptions(replica=replica, num_replicas=num_replicas, ranks_per_host=per_host)
        return resolve_own_device(options, device, num_ranks, rank).index

    assert [own(0, 1, 4, rank=rank) for rank in range(4)] == [0, 1, 2, 3]
    assert [own(0, 1, 8, rank=rank, per_host=2) for rank in range(8)] == 4 * [0, 1]
    assert own(0, 1, 1, second) == 1
    assert [own(replica, 6, 1) for replica in range(6)] == [0, 1, 2, 3, 4, 5]
    assert [own(replica, 3, 2) for replica in range(3)] == [0, 2, 4]
    assert [own(2, 3, 2, rank=rank) for rank in range(2)] == [4, 5]
    assert [own(replica, 2, 2, cpu, rank=1) for replica in range(2)] == [None, None]
    for num_replicas, num_ranks, words, hint in (
        (7, 1, "--replicas 7 with a GPU each needs 7 GPUs: this machine has 6.", "Use up to 6."),
        (2, 4, "--replicas 2 with 4 GPUs each needs 8 GPUs: this machine has 6.", "Use up to 1."),
    ):
        for replica in range(num_replicas):  # each says so, whichever is heard first
            with pytest.raises(ArgumentError) as caught:
                own(replica, num_replicas, num_ranks)
            assert (str(caught.value), caught.value.hint) == (words, hint)
    with pytest.raises(ArgumentError, match="begins at the first GPU, but the device is cuda:1"):
        own(0, 2, 1, second)


def test_engines_share_threads_and_memory_of_a_cpu(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.setattr(build, "usable_cpus", lambda: 6)
    assert [resolve(num_replicas=n).threads for n in (1, 2, 4, 9)] == [6, 3, 1, 1]
    assert resolve(num_replicas=2, threads=5).threads == 5, "what was requested wins"
    assert resolve(num_replicas=3).num_replicas == 3


@pytest.mark.parametrize("option", ["expert_parallel", "data_parallel_attention"])
def test_experts_are_spread_over_several_ranks_only(option):
    with pytest.raises(ArgumentError, match=f"{option}=True needs several ranks"):
        resolve(**{option: True})
