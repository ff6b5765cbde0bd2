"""What does not fit is refused with figures, and what device and dtype mean on this machine."""

from dataclasses import replace
from fractions import Fraction
from math import ceil, floor

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gguf_files import tiny_model
from tests.tiny_llm import LLAMA, greedy, open_tiny
from tiercel.cache.spec import CacheGroup, KVCacheSpec, Plane
from tiercel.config import LoadOptions
from tiercel.engine import build, memory
from tiercel.engine import options as engine_options
from tiercel.engine.load import resolve_config
from tiercel.engine.memory import GIB, Demand, MemoryBudget, cache_blocks
from tiercel.engine.options import (
    dtypes_from,
    resolve_count,
    resolve_device,
    resolve_dtype,
    resolve_share,
)
from tiercel.errors import ArgumentError, OutOfMemoryError
from tiercel.llm import LLM
from tiercel.machine import Memory
from tiercel.models.footprint import Footprint, cache_bytes, weight_footprint
from tiercel.models.source import open_source

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 1)


def make_group(bytes_per_token, policy="full", **fields):
    plane = Plane("k", torch.uint8, (bytes_per_token,))
    return CacheGroup(KVCacheSpec(policy, (plane,), **fields), (0,))


def blocks_of_one_group(bytes_per_token, **sizes):
    (num_blocks,) = cache_blocks([make_group(bytes_per_token)], max_step_tokens=9, **sizes)
    return num_blocks


@settings(max_examples=200, deadline=None)
@given(
    bytes_per_token=st.integers(1, 1000),
    block_size=st.integers(1, 70),
    max_model_len=st.integers(1, 500),
    max_num_seqs=st.integers(1, 9),
    available=st.integers(-1000, 100_000),
)
def test_cache_blocks(bytes_per_token, block_size, max_model_len, max_num_seqs, available):
    bytes_per_block = bytes_per_token * block_size
    sizes = {
        "bytes_per_token": bytes_per_token,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "available": available,
    }
    per_sequence = -(-max_model_len // block_size)
    try:
        num_blocks = blocks_of_one_group(max_model_len=max_model_len, **sizes)
    except OutOfMemoryError as error:
        assert (per_sequence + 1) * bytes_per_block > available
        if "max_model_len" in error.hint:
            fits = int(error.hint.removeprefix("Lower max_model_len to ").split()[0])
            assert 0 < fits < max_model_len
            blocks_of_one_group(max_model_len=fits, **sizes)  # the length that it names does fit
            with pytest.raises(OutOfMemoryError):
                blocks_of_one_group(max_model_len=fits + 1, **sizes)
        else:
            with pytest.raises(OutOfMemoryError):
                blocks_of_one_group(max_model_len=1, **sizes)
        return
    assert num_blocks * bytes_per_block <= available, "the null block counts too"
    assert per_sequence < num_blocks <= 1 + per_sequence * max_num_seqs


def test_a_cache_that_does_not_fit_is_refused_with_figures():
    sizes = {"bytes_per_token": GIB // 256, "block_size": 64, "max_num_seqs": 4}
    with pytest.raises(OutOfMemoryError) as caught:
        blocks_of_one_group(max_model_len=1000, available=2 * GIB, **sizes)
    assert str(caught.value) == (
        "the cache of one sequence of 1000 tokens needs 4.00 GiB but 1.75 GiB are left."
    )
    assert caught.value.hint == "Lower max_model_len to 448 or less."  # 7 blocks and the null block
    with pytest.raises(OutOfMemoryError) as caught:
        blocks_of_one_group(max_model_len=1000, available=-5, **sizes)
    assert "0.00 GiB are left" in str(caught.value)
    assert caught.value.hint == "Use a smaller model."


def test_groups_share_in_proportion_to_a_long_sequence():
    sizes = {"block_size": 10, "max_model_len": 1000, "max_num_seqs": 8, "max_step_tokens": 40}
    full, window = make_group(2), make_group(4, "sliding", window=50)
    # 100 blocks of 20 bytes; a step and the 49 tokens before it in 10 blocks of 40: 2,400.
    null_blocks = 60
    available = null_blocks + int(1.5 * 2400)
    assert cache_blocks([full, window], available=available, **sizes) == [151, 16]
    # From the third sequence on a window alone, 50 tokens in 6 blocks: 2,240.
    available = null_blocks + 2 * 2400 + int(1.5 * 2240)
    assert cache_blocks([full, window], available=available, **sizes) == [351, 30]
    assert cache_blocks([full, window], available=10**9, **sizes) == [801, 57]
    with pytest.raises(OutOfMemoryError) as caught:
        cache_blocks([full, window], available=null_blocks + 2399, **sizes)
    assert caught.value.hint == "Lower max_model_len to 990 or less."


def of_bytes(monkeypatch, num_bytes):
    monkeypatch.setattr(MemoryBudget, "left", lambda self: num_bytes)


def demand(gib, dtype="bfloat16", token_bytes=0):
    """Weights of so many GiB, and 1,000 tokens."""
    return Demand(Footprint(dtype, {"dense": int(gib * GIB)}, 0), 1000, lambda n: n * token_bytes)


def budget_of(available_gib, limit_gib=None):
    """Of a CPU with so much memory available."""
    limit = None if limit_gib is None else int(limit_gib * GIB)
    memory = Memory(int(available_gib * GIB), 64 * GIB, limit)
    return MemoryBudget(CPU, 0.9, lambda: memory)


def test_weights_that_do_not_fit_are_refused_with_figures():
    budget = budget_of(5)
    budget.check(demand(3.9), [])
    with pytest.raises(OutOfMemoryError) as caught:
        budget.check(demand(7.5, "float32"), [demand(3.5)])
    assert str(caught.value) == (
        "the weights need about 7.5 GiB in float32 and one sequence of 1000 tokens 0.0 GiB, but "
        "cpu has 4.0 GiB to use (80% of the 5.0 GiB available)."
    )
    assert caught.value.hint == "Use --dtype bfloat16: it needs 3.5 GiB."


@pytest.mark.parametrize(
    ("needed", "others", "expected"),
    [
        (demand(6), [demand(9, "float32")], "It takes 7.5 GiB of free memory; or use a smaller"),
        (demand(9, "float32"), [demand(6)], "It takes 7.5 GiB of free memory (--dtype bfloat16)"),
        (demand(9, "float32"), [], "It takes 11.2 GiB of free memory; or use a smaller"),
    ],
    ids=["smallest already", "another is smaller", "no other"],
)
def test_the_hint_names_another_dtype_only_if_that_fits(needed, others, expected):
    with pytest.raises(OutOfMemoryError) as caught:
        budget_of(5, limit_gib=6).check(needed, others)
    assert "(80% of the 5.0 GiB available within a limit of 6.0 GiB)" in str(caught.value)
    assert caught.value.hint.startswith(expected)


def test_a_gpu_is_refused_with_its_own_figures(monkeypatch):
    of_bytes(monkeypatch, 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    with pytest.raises(OutOfMemoryError) as caught:
        MemoryBudget(CUDA, 0.9).check(demand(5), [demand(4, "float16")])
    assert str(caught.value) == (
        "the weights need about 5.0 GiB in bfloat16 and one sequence of 1000 tokens 0.0 GiB, but "
        "cuda:1 has 3.0 GiB to use."
    )
    assert caught.value.hint.startswith("It takes 4.0 GiB (--dtype float16); or use")


@pytest.mark.parametrize(
    ("token_bytes", "fitting", "expected"),
    [
        (0, [8, 4], "It takes 5.0 GiB, or share it: 4 such GPUs fit it (--tensor-parallel-size); "),
        (0, [], "It takes 5.0 GiB; or use"),
        (2**22, [4], "It takes 8.9 GiB, or share it: 4 such GPUs fit it (--tensor-parallel-size);"),
    ],
)
def test_more_gpus_are_named_where_they_fit(monkeypatch, token_bytes, fitting, expected):
    of_bytes(monkeypatch, 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    asked = []

    def fit(available):
        asked.append(available)
        return fitting

    needed = replace(demand(5, token_bytes=token_bytes), num_gpus=2)
    with pytest.raises(OutOfMemoryError, match=r" on each of 2 GPUs, but cuda:1 has 3.0") as caught:
        MemoryBudget(CUDA, 0.9).check(needed, [], fit)
    assert asked == [3 * GIB]
    assert caught.value.hint.startswith(expected)
    assert "\n" not in f"{caught.value} {caught.value.hint}"


def test_a_shorter_context_or_more_gpus(monkeypatch):
    of_bytes(monkeypatch, 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    with pytest.raises(OutOfMemoryError) as caught:
        MemoryBudget(CUDA, 0.9).check(demand(2, token_bytes=2**21), [], lambda _: [2])
    assert caught.value.hint == (
        "Lower max_model_len: 512 tokens would fit without any other memory, or share it: 2 such "
        "GPUs fit it (--tensor-parallel-size)."
    )


def test_weights_that_fit_without_room_for_a_sequence_are_refused():
    budget = budget_of(5)
    budget.check(demand(3, token_bytes=2**20), [])
    with pytest.raises(OutOfMemoryError) as caught:
        budget.check(demand(3, token_bytes=2**21), [demand(5, "float32")])
    assert str(caught.value).startswith(
        "the weights need about 3.0 GiB in bfloat16 and one sequence of 1000 tokens 2.0 GiB, but "
        "cpu has 4.0 GiB"
    )
    assert (
        caught.value.hint == "Lower max_model_len: 512 tokens would fit without any other memory."
    )


def test_a_share_of_the_whole_gpu_beside_what_others_hold(monkeypatch):
    free, held = 70 * GIB, 3 * GIB  # by another engine of this process
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held)
    half, all_of_it = MemoryBudget(CUDA, 0.5), MemoryBudget(CUDA, 1.0)
    assert half.left() == 40 * GIB, "10 GiB of others are not its own"
    assert all_of_it.left() == 70 * GIB, "not more than is free"
    held += 15 * GIB
    free -= 15 * GIB
    half.reserve(5 * GIB)
    assert half.left() == 20 * GIB
    free -= 30 * GIB  # another process starts beside it
    assert half.left() == 20 * GIB
    assert all_of_it.left() == 25 * GIB
    free -= 10 * GIB
    assert half.left() == 10 * GIB, "free, less what it keeps for later"
    free += 45 * GIB  # and ends
    assert half.left() == 20 * GIB, "its share does not grow"


def test_a_cpu_gives_part_of_what_is_available():
    total = psutil.virtual_memory().total
    assert 0 < MemoryBudget(CPU, 0.1).left() <= memory.CPU_SHARE * total


def test_engines_that_start_together_share_the_memory_of_a_cpu():
    memory = Memory(800 * GIB, 900 * GIB, None)
    lefts = [MemoryBudget(CPU, 0.9, lambda: memory, num_engines=n).left() for n in (1, 4)]
    assert lefts == [int(0.8 * 800 * GIB), int(0.2 * 800 * GIB)]


def test_what_a_cpu_gives_is_four_fifths_less_what_is_kept_for_later():
    budget = MemoryBudget(CPU, 0.1, lambda: Memory(500 * 1024, 900 * 1024, None))
    assert budget.left() == 400 * 1024
    budget.reserve(1000)
    budget.reserve(24)
    assert budget.left() == 399 * 1024


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=2),
    lengths=st.tuples(st.integers(1, 90), st.integers(1, 8), st.integers(1, 12)),
    window=st.integers(1, 60),
    available=st.integers(0, 40_000),
)
def test_no_group_gets_less_than_its_share_or_more_than_there_is(sizes, lengths, window, available):
    """Both kinds of groups against sums written out block by block, in whole numbers."""
    longest, num_seqs, block_size = lengths
    groups = [make_group(sizes[0]), make_group(sizes[1], "sliding", window=window)]
    whole = len(range(0, longest, block_size))

    def most(num_tokens):
        """Blocks that consecutive tokens are in, from the last token of a block on."""
        return min(whole, len({i // block_size for i in range(-1, num_tokens - 1)}))

    def size_of(needs):
        return sum(need * size for need, size in zip(needs, per_block, strict=True))

    needs, more = [whole, most(window - 1 + 9)], [whole, most(window)]
    per_block = [size * block_size for size in sizes]
    one, left = size_of(needs), available - sum(per_block)
    options = {"block_size": block_size, "max_model_len": longest, "max_num_seqs": num_seqs}
    if left < one:
        with pytest.raises(OutOfMemoryError):
            cache_blocks(groups, max_step_tokens=9, available=available, **options)
        return
    found = cache_blocks(groups, max_step_tokens=9, available=available, **options)
    # Two sequences with a step each, then windows alone.
    num_whole = min(Fraction(left, one), num_seqs, 2)
    num_more = min(num_seqs - num_whole, (left - num_whole * one) / size_of(more))
    for got, need, less in zip(found, needs, more, strict=True):
        exact = num_whole * need + num_more * less
        assert got in (1 + floor(exact), ceil(exact)), "a float may miss by one"
    assert size_of(found) <= available
    assert all(got > need for got, need in zip(found, needs, strict=True)), "one alone always fits"


def v4_group(policy, layers, *entry_bytes, **fields):
    planes = tuple(Plane(f"{i}", torch.uint8, (size,)) for i, size in enumerate(entry_bytes))
    return CacheGroup(KVCacheSpec(policy, planes, **fields), tuple(range(layers)))


def test_entries_get_most_of_the_cache_of_deepseek_v4():
    """40 GB of Flash with its draft head: windows and compressor inputs are at most 15%."""
    groups = [
        v4_group("full", 21, 584, 68, tokens_per_entry=4),
        v4_group("full", 20, 584, tokens_per_entry=128),
        v4_group("sliding", 44, 584, window=128),
        v4_group("sliding", 21, 2048 * 4, 512 * 4, window=8, entries_per_block=32),
        v4_group("sliding", 20, 1024 * 4, window=1),
    ]
    sizes = {"block_size": 128, "max_num_seqs": 64, "max_step_tokens": 8192}
    assert [group.bytes_per_block(128) for group in groups] == [
        21 * 32 * (584 + 68), 20 * 584, 44 * 128 * 584, 21 * 32 * 2560 * 4, 20 * 128 * 1024 * 4
    ]  # fmt: skip
    found = cache_blocks(groups, max_model_len=131_072, available=40 * 10**9, **sizes)
    assert found[:2] == [1 + 64 * 1024] * 2, "64 sequences of full length"
    # Two steps of 64 blocks; a window of 128 and of 8 in 2 blocks of each sequence, of 1 in 1.
    assert found[2:] == [1 + 128 + 128, 1 + 128 + 128, 1 + 128 + 64]
    taken = [n * group.bytes_per_block(128) for n, group in zip(found, groups, strict=True)]
    assert sum(taken[:2]) >= 0.85 * sum(taken)
    found = cache_blocks(groups, max_model_len=131_072, available=20 * 10**9, **sizes)
    taken = [n * group.bytes_per_block(128) for n, group in zip(found, groups, strict=True)]
    assert sum(taken[:2]) >= 0.80 * sum(taken) > 0.79 * 20 * 10**9


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 64])
def test_a_model_with_windows_gets_more_full_blocks_than_with_a_step_for_each(num_seqs):
    """Layers of Gemma 3: 5 of 6 see 1,024 tokens."""
    groups = [make_group(100), make_group(500, "sliding", window=1024)]
    sizes = {"block_size": 64, "max_model_len": 32_768, "max_num_seqs": num_seqs}
    available = num_seqs * 6_000_000
    found = cache_blocks(groups, max_step_tokens=2048, available=available, **sizes)
    share = min(num_seqs, (available - 64 * 600) / (512 * 6_400 + 49 * 32_000))
    assert found[0] >= int(1 + share * 512)
    assert found[1] <= 1 + share * 49


def test_no_figure_from_the_system():
    with pytest.raises(OutOfMemoryError, match="how much memory"):
        MemoryBudget(CPU, 0.9, lambda: None).left()


@pytest.mark.reliability
@pytest.mark.parametrize(("available", "what"), [(1000, "weights"), (500_000, "of 4096 tokens 0")])
def test_a_model_that_does_not_fit_is_refused_at_load(monkeypatch, tmp_path, available, what):
    # 0.45 MB of weights and, at 512 bytes a token, 2.1 MB of cache
    path = tiny_model(tmp_path / "m.gguf", metadata={"llama.context_length": 4096})
    of_bytes(monkeypatch, available)
    with pytest.raises(OutOfMemoryError, match=what):
        LLM(path, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    "name", ["nvidia", "", "CPU", "cuda:", "cuda:x", "cuda:-1", "cuda:0 ", "cpu:0", "mps", None, 5]
)
def test_unknown_device(name):
    with pytest.raises(ArgumentError) as caught:
        resolve_device(name)
    assert f"device={str(name)!r}" in str(caught.value)
    assert "cuda:INDEX" in caught.value.hint


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:3"])
def test_cuda_without_a_gpu(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError) as caught:
        resolve_device(name)
    assert f"device={name!r}: no usable NVIDIA GPU" in str(caught.value)
    assert "--device cpu" in caught.value.hint
    assert resolve_device("auto") == CPU


def test_cuda_with_two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, index in (("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)):
        assert resolve_device(name) == torch.device("cuda", index)
    assert resolve_device("cpu") == CPU
    for name in ("cuda:2", "cuda:99999999999999999999"):
        with pytest.raises(ArgumentError) as caught:
            resolve_device(name)
        assert "this machine has 2 GPU(s)" in str(caught.value)
        assert caught.value.hint == "Use cuda:0 to cuda:1."


def test_a_device_of_torch_is_understood():
    assert resolve_device(CPU) == CPU


def ask_nothing(dtype):
    raise AssertionError(f"the memory decides nothing here: {dtype}")


@pytest.mark.parametrize("name", ["half", "fp16", "", "FLOAT32", None, torch.float32])
def test_unknown_dtype(name):
    with pytest.raises(ArgumentError) as caught:
        resolve_dtype(name, CPU, "gguf", ask_nothing)
    assert f"dtype={name!r}" in str(caught.value)
    assert "float32, float16, bfloat16" in caught.value.hint


@pytest.mark.usefixtures("without_native")
def test_float16_is_refused_on_a_cpu():
    with pytest.raises(ArgumentError, match="dtype='float16'"):
        resolve_dtype("float16", CPU, "gguf", ask_nothing)
    assert resolve_dtype("float16", CUDA, "hf", ask_nothing) == torch.float16


def test_dtypes_with_the_native_library(monkeypatch):
    monkeypatch.setattr(engine_options, "uses_native", lambda device: device == "cpu")
    assert resolve_dtype("float16", CPU, "gguf", ask_nothing) == torch.float16
    assert resolve_dtype("auto", CPU, "gguf", ask_nothing) == torch.float16
    assert resolve_dtype("auto", CPU, "hf", ask_nothing) == torch.bfloat16
    assert dtypes_from(torch.float32, CPU) == ["float32", "float16", "bfloat16"]


@pytest.mark.usefixtures("without_native")
def test_dtypes(monkeypatch):
    for device in (CPU, CUDA):
        assert resolve_dtype("float32", device, "gguf", ask_nothing) == torch.float32
        assert resolve_dtype("bfloat16", device, "gguf", ask_nothing) == torch.bfloat16
    assert resolve_dtype("auto", CUDA, "gguf", ask_nothing) == torch.float16
    assert resolve_dtype("auto", CUDA, "hf", ask_nothing) == torch.bfloat16
    assert dtypes_from(torch.float32, CPU) == ["float32", "bfloat16"]
    assert dtypes_from(torch.float16, CUDA) == ["float16", "float32", "bfloat16"]
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        assert resolve_dtype("auto", CPU, "gguf", ask_nothing) == torch.bfloat16
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert resolve_dtype("auto", CPU, "gguf", lambda dtype: dtype == "float32") == torch.float32
    assert resolve_dtype("auto", CPU, "gguf", lambda dtype: dtype != "float32") == torch.bfloat16


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize(("spare_bytes", "expected"), [(0, torch.float32), (-1, torch.bfloat16)])
def test_float32_is_taken_where_weights_and_one_sequence_fit(monkeypatch, spare_bytes, expected):
    """On a processor without fast planes; weights alone are not enough."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    source = open_source(LLAMA)
    needed = weight_footprint(source, "float32", "cpu").nbytes
    needed += cache_bytes(source.config, 100, "float32")
    of_bytes(monkeypatch, needed + spare_bytes)
    options = LoadOptions(device="cpu", max_model_len=100)
    assert resolve_config(source, options).dtype == expected


@pytest.mark.parametrize(
    "value",
    [0, -1, 11, True, 1.0, "5", [5], 10**5000],
    ids=lambda value: f"{value!r:.5}" if not isinstance(value, int) or value < 99 else "huge",
)
def test_counts(value):
    with pytest.raises(ArgumentError, match=r"max_num_seqs=.* is out of range") as caught:
        resolve_count("max_num_seqs", value, 3, 10)
    assert caught.value.hint == "Use 1 to 10."
    assert resolve_count("max_num_seqs", None, 3, 10) == 3
    assert [resolve_count("max_num_seqs", i, 3, 10) for i in (1, 10)] == [1, 10]
    assert resolve_count("seed", -5, 0, 10, low=-5) == -5


@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.1, float("nan"), True, "0.5", None])
def test_share(value):
    with pytest.raises(ArgumentError, match="gpu_memory_utilization="):
        resolve_share(value)
    assert resolve_share(1) == 1
    assert resolve_share(0.5) == 0.5


class LoadingError(Exception):
    """Stops loading."""


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (200, (True, True)),
        (199, (False, True)),
        (158, (False, True)),
        (157, (False, False)),
        (60, (False, False)),
        (59, OutOfMemoryError),
    ],
)
def test_copies_of_weights_take_half_of_the_memory_at_most(monkeypatch, left, expected):
    """100 bytes with dense copies, 60 without; with 50 for the fused step 7 tenths at most."""
    seen = []

    def read(source, device, load, *, dense_copies, step_copy, sharding):
        seen.append((dense_copies, step_copy))
        raise LoadingError

    of_bytes(monkeypatch, left)

    def measure(*_, dtype, dense_copies=False, **__):
        return Footprint(dtype, {"packed": 60, "copies": 40 * dense_copies}, 0)

    monkeypatch.setattr(build, "weight_footprint", measure)
    monkeypatch.setattr(build, "step_copy_bytes", lambda *_: 50)
    monkeypatch.setattr(build, "cache_bytes", lambda *_: 0)
    monkeypatch.setattr(build, "WeightReader", read)
    with pytest.raises(OutOfMemoryError if expected is OutOfMemoryError else LoadingError):
        open_tiny()
    assert seen == ([] if expected is OutOfMemoryError else [expected])


@pytest.mark.parametrize("spec", ["off", "ngram"])
@pytest.mark.parametrize("longest", [64, 65, 124, 128])
def test_rows_and_pools_have_room_for_the_longest_text(longest, spec):
    with open_tiny(max_model_len=longest, max_num_seqs=3, spec=spec) as llm:
        rows, scheduler = llm._engine.runner.rows, llm._engine.scheduler
        pools, num_drafts = llm._engine.runner.pools, llm.config.spec.max_drafts
        per_sequence = -(-longest // 64)
        assert num_drafts == (5 if spec == "ngram" else 0)
        assert rows.token_ids.shape == (4, longest + 1 + num_drafts)
        assert rows.block_tables.shape == (1, 4, -(-(longest + num_drafts) // 64))
        assert [allocator.num_blocks for allocator in scheduler.cache.allocators] == [
            1 + 3 * per_sequence
        ]
        for plane in pools[0].layers[0].values():
            assert plane.shape[:2] == (1 + 3 * per_sequence, 64)
        assert scheduler.budget.max_tokens == llm.config.max_num_batched_tokens
        (output,) = llm.generate({"prompt_token_ids": [5] * (longest - 4)}, greedy(None))
        assert len(output.outputs[0].token_ids) == 4
