"""What is timed of a model's kernels, and against which work it is held."""

import pytest
import torch

from tests.gguf_files import tiny_model
from tests.tiny_llm import gpu_share
from tiercel.config import LoadOptions
from tiercel.engine.load import load_model
from tiercel.errors import ArgumentError
from tiercel.kernels.native.forms import has_native
from tiercel.profiling import device_timing, kernel_times
from tiercel.profiling.device_timing import Ceilings, calls_us, measure_ceilings, times_us
from tiercel.profiling.kernel_times import AttentionCase, KernelTime, measure_kernels

CPU = torch.device("cpu")


def load(path, device="cpu", **options):
    given = {"max_model_len": 256, "max_num_seqs": 4} | options
    return load_model(path, LoadOptions(device=device, dtype="float32", **given), None)


def measure(loaded, tokens, cases):
    heard = []
    found = list(measure_kernels(loaded, tokens, cases, 0.001, heard.append))
    assert len(heard) == 5 * len(tokens) + len(cases)
    return found


@pytest.mark.usefixtures("without_native")
def test_products_are_counted(tmp_path):
    loaded = load(tiny_model(tmp_path / "m.gguf", "qwen3", hidden=64, ff=128, qtype="Q8_0"))
    found = measure(loaded, [1, 6], [])
    names = ["q, k, v 128 x 64", "o 64 x 64", "gate, up 256 x 64", "down 64 x 128", "head 300 x 64"]
    assert [(x.name, x.size) for x in found] == [
        (name, size) for name in names for size in ("1 tokens", "6 tokens")
    ]
    # A float32 engine on a CPU keeps these weights dense.
    assert [x.num_bytes for x in found[:2]] == [
        4 * (128 * 64 + count * (128 + 64)) for count in (1, 6)
    ]
    assert [x.flops for x in found[:2]] == [2 * 128 * 64, 6 * 2 * 128 * 64]
    assert all(x.us > 0 and not x.is_cold for x in found)


def test_every_layer_has_its_turn(tmp_path, monkeypatch):
    loaded = load(tiny_model(tmp_path / "m.gguf", layers=3))
    turns = []
    monkeypatch.setattr(kernel_times, "times_us", lambda calls, *_: turns.append(calls) or [1.0])
    measure(loaded, [1], [AttentionCase(2, 1, 70)])
    assert [len(calls) for calls in turns] == [3, 3, 3, 3, 1, 3]
    layers = loaded.engine.runner.model.layers
    assert [call.func for call in turns[0]] == [layer.attention.qkv for layer in layers]


def test_attention_is_counted_by_what_is_seen(tmp_path):
    loaded = load(tiny_model(tmp_path / "m.gguf", "gemma3", heads=4, kv_heads=2, head_dim=16))
    sliding, full = measure(loaded, [], [AttentionCase(3, 1, 100)])  # a window of 6, every other
    assert sliding.name == "attention 4/2 x 16, window 6"
    assert full.name == "attention 4/2 x 16"
    assert full.size == "3 x 1 on 100"
    both = 2 * 3 * 4 * 16 * 4  # queries and results
    assert sliding.num_bytes == 2 * 3 * 6 * 2 * 16 * 4 + both
    assert full.num_bytes == 2 * 3 * 100 * 2 * 16 * 4 + both
    assert full.flops == 4 * 4 * 16 * 3 * 100
    assert sliding.flops == 4 * 4 * 16 * 3 * 6
    (_, prompt) = measure(loaded, [], [AttentionCase(1, 40, 40)])
    assert prompt.flops == 4 * 4 * 16 * (40 * 41 // 2)


@pytest.mark.skipif(not has_native(), reason="needs the native library")
@pytest.mark.parametrize("queries", [1, 40])
def test_the_native_library_is_timed_where_it_runs_the_step(queries, tmp_path):
    path = tiny_model(tmp_path / "m.gguf", "gemma3", heads=4, kv_heads=2, head_dim=16, layers=3)
    loaded = load(path)
    model, batch = (
        loaded.engine.runner.model,
        kernel_times._make_batch(loaded, AttentionCase(3, queries, 50)),
    )
    indices = []
    for timed in model.timed_attention(batch):
        for call in timed.calls:
            index, heads, _ = call.args
            assert call.func == model.native_layers.attend
            indices.append(index)
            attention = model.layers[index].attention
            attention.k_cache.normal_()  # the batch has no slots, so nothing is written
            attention.v_cache.normal_()
            given = torch.randn_like(heads)
            expected = attention.rope_and_attend(
                given.flatten(1).clone(), batch, attention.plan(batch)
            )
            found = model.native_layers.attend(index, given.clone(), batch)
            torch.testing.assert_close(found, expected.view_as(found), rtol=1e-4, atol=1e-5)
    assert sorted(indices) == [0, 1, 2]


def test_a_case_beyond_the_cache_is_refused(tmp_path):
    loaded = load(tiny_model(tmp_path / "m.gguf"), max_num_seqs=1)
    with pytest.raises(ArgumentError, match="64 requests of 200 tokens need 256 blocks of 64"):
        measure(loaded, [], [AttentionCase(64, 1, 200)])


def test_a_window_needs_its_own_blocks_alone(tmp_path):
    """The pool of sliding layers has no room for whole contexts, which the default cases have."""
    loaded = load(tiny_model(tmp_path / "m.gguf", "gemma3"), max_num_batched_tokens=64)
    pools = loaded.engine.runner.pools
    by_policy = {pool.group.spec.policy: index for index, pool in enumerate(pools)}
    assert pools[by_policy["sliding"]].num_blocks <= 4 * 4
    batch = kernel_times._make_batch(loaded, AttentionCase(4, 1, 256))
    sliding = batch.block_tables[by_policy["sliding"]]
    assert not sliding[:, :3].any()  # of 64 tokens; the window is 6
    assert len(set(sliding[:, 3].tolist()) - {0}) == 4
    full = batch.block_tables[by_policy["full"]]
    assert len(set(full.flatten().tolist()) - {0}) == 16


def test_the_ceiling_is_the_tighter_one():
    ceilings = Ceilings(read_gbps=100.0, tflops=2.0)
    assert KernelTime("", "", 10**6, 0, 20.0, True).of_ceiling(ceilings) == pytest.approx(0.5)
    assert KernelTime("", "", 0, 2 * 10**7, 20.0, True).of_ceiling(ceilings) == pytest.approx(0.5)


def test_calls_are_timed_in_turn():
    seen = []
    samples = calls_us([lambda: seen.append(0), lambda: seen.append(1)], CPU, 5)
    assert seen == [0, 1, 0, 1, 0, 1, 0]  # two that warm up
    assert len(samples) == 5
    assert samples == sorted(samples)
    assert len(times_us([lambda: None], CPU, 1e-9)) == 7


class Clock:
    """Stands still but for what is said to take time."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def slow(self, function, seconds):
        """The function, taking so many seconds of this clock; some depend on its arguments."""

        def call(*args, **kwargs):
            self.now += seconds(*args) if callable(seconds) else seconds
            return function(*args, **kwargs)

        return call


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(device_timing, "time", made)
    monkeypatch.setattr(device_timing, "CPU_SIZES", (64, 128))
    monkeypatch.setattr(torch, "sum", made.slow(torch.sum, 1.0))
    return made


@pytest.mark.parametrize(
    ("dtype", "seconds", "expected"),
    [
        (torch.bfloat16, {"bfloat16": 40.0, "float32": 2.0, "packed": 1.0}, 1.0),
        (torch.bfloat16, {"bfloat16": 40.0, "float32": 2.0, "packed": 3.0}, 2.0),
        (torch.bfloat16, {"bfloat16": 0.5, "float32": 2.0, "packed": 1.0}, 0.5),
        (torch.float32, {"float32": 2.0, "packed": 4.0}, 2.0),
    ],
    ids=["4 bits", "widened", "16 bits", "float32"],
)
def test_the_ceiling_of_a_processor_is_that_of_its_fastest_product(
    dtype, seconds, expected, clock, monkeypatch
):
    """A dense product in bfloat16 may be the slowest by far, and a model not use it."""
    dense = clock.slow(torch.mm, lambda a, _: seconds[str(a.dtype).removeprefix("torch.")])
    packed = clock.slow(device_timing.linear, seconds["packed"])
    monkeypatch.setattr(torch, "mm", dense)
    monkeypatch.setattr(device_timing, "linear", packed)
    found = measure_ceilings(CPU, dtype, 1)
    assert found.tflops == pytest.approx(2 * 64**3 / expected / 1e12)


def test_products_grow_while_a_call_is_short(clock, monkeypatch):
    mm = clock.slow(torch.mm, lambda a, _: 1e-3 if len(a) == 64 else 2e-3)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(device_timing, "linear", clock.slow(device_timing.linear, 1.0))
    found = measure_ceilings(CPU, torch.float32, 1)
    assert found.tflops == pytest.approx(2 * 128**3 / 2e-3 / 1e12)


def test_the_fastest_call_counts(clock, monkeypatch):
    seconds = iter([0.2, 0.05, 0.1])
    run = clock.slow(lambda: None, lambda: next(seconds))
    assert device_timing._fastest_us(run) == pytest.approx(5e4)


@pytest.mark.parametrize(
    ("asked", "read"), [(1, 8 << 20), ((9 << 20) + 3, 9 << 20), (1 << 40, 512 << 20)]
)
def test_as_much_is_read_as_a_step_does(asked, read, clock, monkeypatch):
    """A model that fits the caches is read from there, and so is what it is compared with."""
    sizes = []
    monkeypatch.setattr(torch, "sum", clock.slow(lambda *_args, **_options: None, 1.0))
    monkeypatch.setattr(
        torch, "randint", lambda _low, _high, shape, **_options: sizes.append(shape[0])
    )
    assert device_timing.read_gbps(CPU, asked) == pytest.approx(read / 1e9)
    assert sizes == [read // 8]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", hidden=256, ff=256)
    loaded = load(path, "cuda", gpu_memory_utilization=gpu_share())
    found = measure(loaded, [1, 40], [AttentionCase(2, 1, 100), AttentionCase(1, 90, 90)])
    assert len(found) == 12
    ceilings = measure_ceilings(torch.device("cuda"), torch.float16)
    assert all(0 < x.of_ceiling(ceilings) < 1 for x in found)
