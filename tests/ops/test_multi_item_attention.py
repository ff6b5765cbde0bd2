"""Prefill attention: pages, chunks, windows and items, on the CPU, in Triton and on Hopper."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tiercel.errors import ArgumentError
from tiercel.kernels import multi_item_attention as kernel
from tiercel.kernels.attention_tiles import PlannedTiles, cut_tiles, make_tiles, part_steps
from tiercel.ops.multi_item_attention import multi_item_attention, plan_multi_item_attention
from tiercel.reference import multi_item_attention as oracle

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")

# A request: (cached tokens, P, item lengths); 0 is a token that sees the prefix alone. Without
# items P is the whole length.
PLAIN = {
    "one token": [(0, 1, [])],
    "prompt": [(0, 70, [])],
    "chunk": [(23, 30, [])],
    "chunk from a block's end": [(64, 130, [])],
    "decode step": [(66, 67, [])],
    "mixed": [(16, 17, []), (0, 9, []), (65, 66, []), (24, 29, []), (0, 2, [])],
}
ITEMS = {
    "worked example": [(5, 5, [0, 3, 0, 2, 0, 4, 0])],
    "no prefix": [(0, 0, [5, 1, 29])],
    "no prefix, delimiters": [(0, 0, [0, 3, 0, 0, 2, 0])],
    "prefix computed here": [(0, 33, [4, 1, 7])],
    "prefix computed in part": [(20, 41, [3, 17])],
    "one-token items": [(64, 64, [1] * 21)],
    "one item over tiles": [(3, 3, [40])],
    "among plain requests": [(13, 30, []), (20, 20, [7, 7, 3]), (0, 0, [6]), (0, 5, [])],
}
# What the CUDA kernel can get wrong: page ends, tile ends, steps of 64 and 128 keys.
LARGE = [
    [(512, 512, [16] * 20)],
    [(0, 0, [5, 1, 129, 64])],
    [(1, 1, [3, 2, 4])],
    [(127, 127, [1, 129, 127, 40, 2])],
    [(0, 300, [])],
    [(513, 513, [33] * 9 + [128, 1])],
    [(0, 129, [17, 1, 90])],
    [(256, 513, [31, 129])],
    [(2048, 2048, [1] * 70)],
    [(0, 2000, [])],
    [(700, 1500, []), (1000, 1001, []), (63, 65, []), (64, 128, [])],
    [(0, 130, []), (200, 200, [7] * 13), (64, 64, [0, 129, 0]), (0, 1, [1]), (700, 1500, [100, 3])],
    [(0, 0, [0] * 40 + [3]), (2500, 2501, [])],
]
HEADS = [(9, 3, 64), (14, 2, 64), (8, 2, 128), (4, 1, 256), (4, 1, 64), (3, 3, 40)]
WINDOWS = (0, 6, 64)
# Relative, of whole results (norms): weights are rounded to 16 bits before they meet the values,
# and the result once more; each costs up to half a unit.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-8 + 2**-9, torch.float16: 2**-11 + 2**-12}
FINITE = 1000.0  # seen once, it takes over the softmax; the CUDA kernel asks for finite slots
SCALE = 0.15  # not 1 / sqrt(head_dim): scale is an argument


@dataclass
class Case:
    """Arguments of the op, and each request's unpaged keys and values."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor
    query_lens: list[int]
    context_lens: list[int]
    prefix_len: list[int]
    item_start: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def op(self, window=0, **changes):
        items = {
            "prefix_len": self.prefix_len,
            "item_start": self.item_start,
            "k_new": self.k_new,
            "v_new": self.v_new,
        }
        caches = (self.k_cache, self.v_cache, self.tables)
        lengths = (self.query_lens, self.context_lens)
        options = {"window": window, **items, **changes}
        return multi_item_attention(self.q, *caches, *lengths, SCALE, **options)

    def expected(self, window=0, softcap=0.0):
        return self.expected_both(window, softcap)[0]

    def expected_both(self, window=0, softcap=0.0):
        lengths = (self.query_lens, SCALE, window, self.prefix_len, self.item_start, softcap)
        return oracle.multi_item_attention(self.q, self.keys, self.values, *lengths)

    def launch(self, config, window=0, *, heads_first=None, softcap=0.0, steps=0):
        """A kernel in a variant of choice, on an output of NaN; `steps` > 0: in parts."""
        group = self.q.shape[1] // self.k_cache.shape[2]
        starts = self.item_start.numpy()
        lengths = (self.query_lens, self.context_lens, self.prefix_len)
        tiles = make_tiles(*lengths, starts, config.block_m // group)
        step, parts, buffers = config.block_m // group, None, None
        if steps:
            tiles, parts = cut_tiles(tiles, steps, step)
        model = (self.q.dtype, self.q.shape[2], group, self.k_cache.shape[1])
        plan = PlannedTiles(config, model, tiles, starts, parts, step).upload(self.q.device)
        if heads_first is not None:
            plan.counter[3] = int(heads_first)

        def poisoned(*shape, dtype=torch.float32):
            return torch.full(shape, float("nan"), dtype=dtype, device=self.q.device)

        out = poisoned(*self.q.shape, dtype=self.q.dtype)
        if steps:
            rows = (plan.num_part_rows, *self.q.shape[1:])
            lse = poisoned(*self.q.shape[:2])
            buffers = kernel.PartBuffers(poisoned(*rows), poisoned(*rows[:2]), lse)
        tensors = (self.q, self.k_cache, self.v_cache, self.tables, self.k_new, self.v_new, out)
        kernel.launch_multi_item_attention(*tensors, plan, SCALE, window, softcap, buffers)
        return (out.flatten(1), lse) if steps else out.flatten(1)


def item_starts(cached, prefix, items):
    """item_start of the new tokens; what lies below P is never read and holds nonsense."""
    starts, at = [(-7, 10**6)[i % 2] for i in range(prefix)], prefix
    for length in items:
        starts += [at] * length if length else [at + 1]
        at += max(1, length)
    return starts[cached:], at


def make_case(
    requests, shape, block_size, dtype, device, *, poison=float("nan"), q_scale=1.0, is_run=False
):
    """Blocks in random order; poison in every slot and new row that no token may read."""
    heads, kv_heads, head_dim = shape
    counts = [-(-request[1] // block_size) for request in requests]
    num_blocks, most = sum(counts) + 4, max(counts) + 1
    free = (1 + (torch.arange if is_run else torch.randperm)(num_blocks - 1)).tolist()
    tables = torch.zeros(len(requests), most + 3, dtype=torch.int32)
    caches = torch.full((2, num_blocks, block_size, kv_heads, head_dim), poison).to(dtype)
    fused, starts, query_lens, context_lens, keys, values = [], [], [], [], [], []
    for request, (cached, prefix, items) in enumerate(requests):
        own, length = item_starts(cached, prefix, items)
        entries = torch.randn(2, length, kv_heads, head_dim).to(dtype)
        blocks = torch.tensor(free[: counts[request]], dtype=torch.int32)
        free = free[counts[request] :]
        tables[request, : len(blocks)] = blocks
        places = torch.arange(prefix)
        slots = blocks[places // block_size].long() * block_size + places % block_size
        caches.flatten(1, 2)[:, slots] = entries[:, :prefix]
        rows = torch.full((length, heads + 2 * kv_heads, head_dim), poison).to(dtype)
        rows[:, :heads] = q_scale * torch.randn(length, heads, head_dim)
        rows[prefix:, heads:] = entries[:, prefix:].transpose(0, 1).flatten(1, 2)
        fused.append(rows[cached:])
        starts += own
        query_lens.append(length - cached)
        context_lens.append(length)
        keys.append(entries[0].to(device))
        values.append(entries[1].to(device))
    q, k_new, v_new = torch.cat(fused).to(device).split((heads, kv_heads, kv_heads), dim=1)
    k_cache, v_cache = caches.to(device)
    return Case(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        tables=tables.to(device)[:, :most],
        query_lens=query_lens,
        context_lens=context_lens,
        prefix_len=[request[1] for request in requests],
        item_start=torch.tensor(starts, dtype=torch.int32),
        k_new=k_new,
        v_new=v_new,
        keys=keys,
        values=values,
    )


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def assert_lse(actual, expected, atol):
    """Equal sums; where nothing is seen both are minus infinity."""
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


def triton_config(block_m=16, block_n=16):
    return kernel.MultiItemAttentionConfig("triton", block_m, block_n, 4, 1)


def cuda_config(variant):
    return kernel.MultiItemAttentionConfig(variant, 128, 128, 12, 5)


# ---- the op


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("requests", (PLAIN | ITEMS).values(), ids=PLAIN | ITEMS)
def test_cpu_matches_oracle(requests, shape, window):
    case = make_case(requests, shape, 16, torch.float32, torch.device("cpu"))
    out = case.op(window)
    assert out.shape == (len(case.q), shape[0] * shape[2])
    assert relative_error(out, case.expected(window)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("requests", (PLAIN | ITEMS).values(), ids=PLAIN | ITEMS)
def test_cpu_matches_oracle_in_16_bits(requests, dtype):
    for block_size, window in ((64, 0), (4, 6)):
        case = make_case(requests, (9, 3, 64), block_size, dtype, torch.device("cpu"), is_run=True)
        out = case.op(window)
        assert out.dtype == dtype
        assert relative_error(out, case.expected(window)) < TOLERANCE[dtype]


# Soft-caps near the scores, so that they decide; nats of sums of float32 scores.
SOFTCAP, LSE_TOLERANCE = 0.7, 1e-4


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (6, 0.0), (0, SOFTCAP), (6, SOFTCAP)])
@pytest.mark.parametrize("requests", (PLAIN | ITEMS).values(), ids=PLAIN | ITEMS)
def test_soft_caps_and_sums_match_oracle(requests, window, softcap, device):
    """The op's own choice of a kernel, and the Triton kernel in parts of one step."""
    case = make_case(requests, (9, 3, 64), 16, torch.float32, device)
    expected, sums = case.expected_both(window, softcap)
    lse = torch.full(case.q.shape[:2], float("nan"), device=device)
    out = case.op(window, softcap=softcap, lse=lse)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]
    assert_lse(lse, sums, LSE_TOLERANCE)
    assert relative_error(case.op(window, softcap=softcap), expected) < TOLERANCE[torch.float32]
    for steps in (1, 99):
        out, lse = case.launch(triton_config(), window, softcap=softcap, steps=steps)
        if window and steps == 1:
            continue  # windows are never cut: a part's end is not P
        assert relative_error(out, expected) < TOLERANCE[torch.float32]
        assert_lse(lse, sums, LSE_TOLERANCE)
    if softcap:
        plain = case.expected_both(window)[1]
        assert not torch.allclose(plain, sums, rtol=0, atol=1e-2), "the soft-cap decides"


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_triton_parts_match_oracle(steps, device):
    """Long prefixes in parts, merged; causal rows, items and rows that see nothing."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for requests in (
        [(300, 300, [4, 0, 3])],
        [(500, 530, []), (5, 9, [2]), (0, 0, [0, 2])],
        [(260, 290, [3, 7])],
    ):
        case = make_case(requests, (4, 2, 64), 64, dtype, device)
        expected, sums = case.expected_both()
        out, lse = case.launch(triton_config(32, 32), steps=steps)
        assert relative_error(out, expected) < TOLERANCE[dtype]
        assert_lse(lse, sums, 1e-4 if dtype == torch.float32 else 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((32, 8, 128), torch.bfloat16),
        ((32, 8, 128), torch.float16),
        ((9, 3, 64), torch.bfloat16),
        ((4, 1, 256), torch.float16),
    ],
    ids=str,
)
def test_gpu_matches_oracle(shape, dtype, device):
    """Whichever kernel is chosen, for small requests and large."""
    for requests in [*PLAIN.values(), *ITEMS.values(), *LARGE[:4]]:
        case = make_case(requests, shape, 64, dtype, device, poison=FINITE)
        assert relative_error(case.op(), case.expected()) < TOLERANCE[dtype]
    case = make_case(LARGE[-2], shape, 64, dtype, device, poison=FINITE)
    assert relative_error(case.op(100), case.expected(100)) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [0, 5])
def test_without_items_attention_is_causal(window, device):
    """No prefix_len and no new keys: everything is read from the cache."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    case = make_case(PLAIN["mixed"], (9, 3, 64), 64, dtype, device)
    plain = {"prefix_len": None, "item_start": None, "k_new": None, "v_new": None}
    out = case.op(window, **plain)
    assert torch.equal(out, case.op(window))
    assert relative_error(out, case.expected(window)) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32, 8, 128), (9, 3, 64)], ids=str)
def test_a_plan_serves_all_layers(shape, device):
    for requests in (PLAIN["mixed"], ITEMS["among plain requests"]):
        first, second = (
            make_case(requests, shape, 64, torch.bfloat16, device, poison=FINITE) for _ in "ab"
        )
        items = {"prefix_len": first.prefix_len, "item_start": first.item_start}
        lengths = (first.query_lens, first.context_lens)
        plan = plan_multi_item_attention(
            *lengths, num_heads=shape[0], k_cache=first.k_cache, **items
        )
        for case in (first, second, first):
            assert torch.equal(case.op(plan=plan), case.op())
        other = make_case([(0, 70, [])], shape, 64, torch.bfloat16, device, poison=FINITE)
        with pytest.raises(ArgumentError, match="the plan is of"):
            other.op(plan=plan)


def test_a_cpu_needs_no_plan():
    cache = torch.zeros(3, 16, 2, 8)
    assert plan_multi_item_attention([3], [5], num_heads=4, k_cache=cache) is None


def test_no_requests(device):
    cache = torch.zeros(4, 16, 3, 64, device=device)
    q, tables = torch.empty(0, 9, 64, device=device), torch.zeros(0, 4, device=device).int()
    assert multi_item_attention(q, cache, cache, tables, [], [], 0.1).shape == (0, 9 * 64)


def test_arguments_are_left_alone(device):
    case = make_case(ITEMS["among plain requests"], (9, 3, 64), 16, torch.float32, device)
    tensors = (case.q, case.k_cache, case.v_cache, case.k_new, case.v_new, case.item_start)
    before = [tensor.clone() for tensor in tensors]
    assert torch.equal(case.op(), case.op())
    for tensor, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)


# ---- the Triton kernel; in the interpreter without a GPU, where bfloat16 products are wrong


@pytest.mark.parametrize(
    ("shape", "block_size", "window", "tile", "dtype"),
    [
        ((9, 3, 64), 64, 0, (16, 16), torch.float16),
        ((14, 2, 64), 64, 6, (32, 32), torch.float32),
        ((8, 2, 128), 16, 0, (32, 32), torch.float32),  # two pages a step
        ((4, 1, 256), 64, 64, (16, 16), torch.float16),
        ((4, 1, 64), 32, 13, (64, 16), torch.float32),
        ((3, 3, 40), 16, 0, (16, 16), torch.float32),  # columns beyond the head
    ],
    ids=str,
)
def test_triton_matches_oracle(shape, block_size, window, tile, dtype, device):
    dtype = torch.bfloat16 if device.type == "cuda" else dtype
    for requests in (PLAIN | ITEMS).values():
        case = make_case(requests, shape, block_size, dtype, device)
        out = case.launch(triton_config(*tile), window)
        assert relative_error(out, case.expected(window)) < TOLERANCE[dtype]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_triton_matches_oracle_in_selected_tiles(head_dim, device):
    """As launched: tiles of 128 rows; over several of them where a GPU makes it bearable."""
    shape, dtype = (6, 2, head_dim), torch.float16
    config = kernel.select_multi_item_attention(dtype, head_dim, 3, 64, 0, 0.0, 100, (8, 0))
    large = [LARGE[3], LARGE[-2]] if device.type == "cuda" else [[(100, 190, []), (5, 70, [9, 40])]]
    for requests in large:
        case = make_case(requests, shape, 64, dtype, device)
        for heads_first in (True, False):
            out = case.launch(config, heads_first=heads_first)
            assert relative_error(out, case.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("is_item", [False, True])
@pytest.mark.parametrize("window", [0, 1, 5, 22])
def test_which_keys_each_token_sees(window, is_item, device):
    """One huge value at a time: it shows in exactly the tokens whose mask has the key."""
    requests = [(4, 9, [3, 0, 8])] if is_item else [(6, 23, [])]
    case = make_case(requests, (4, 2, 64), 16, torch.float32, device, poison=0.0)
    case.q *= 0.1
    length, cached, prefix = case.context_lens[0], requests[0][0], requests[0][1]
    mask = oracle.make_mask(length - cached, length, prefix, case.item_start, window)
    blocks = case.tables[0].tolist()
    for key in range(length):
        case.v_cache.zero_()
        case.v_new.zero_()
        if key < prefix:
            case.v_cache[blocks[key // 16], key % 16] = 1000.0
        else:
            case.v_new[key - cached] = 1000.0
        for out in (case.op(window), case.launch(triton_config(), window)):
            is_seen = mask[:, key]
            assert (out.float().cpu()[is_seen] > 1.0).all()  # a weight of at least a thousandth
            assert (out.float().cpu()[~is_seen] == 0.0).all()


@pytest.mark.parametrize(
    "change",
    [
        {"prefix_len": [21]},  # a key too many for items
        {"item_start": [-1]},  # items see the end of the one before
        {"window": 7},
        {"context": 1},  # tokens see themselves late
    ],
    ids=str,
)
def test_a_wrong_mask_is_seen(change, device):
    """Negative control: of a mask off by one, the comparison fails by far."""
    case = make_case([(4, 20, [3, 5, 8])], (4, 2, 64), 16, torch.float32, device)
    window = change.get("window", 6)
    prefix = change.get("prefix_len", case.prefix_len)
    starts = case.item_start + (change.get("item_start", [0])[0])
    keys, values = (
        [torch.roll(x, change.get("context", 0), 0) for x in rows]
        for rows in (case.keys, case.values)
    )
    wrong, _ = oracle.multi_item_attention(
        case.q, keys, values, case.query_lens, SCALE, window, prefix, starts
    )
    right = case.expected(6)
    for out in (case.op(6), case.launch(triton_config(), 6)):
        assert relative_error(out, right) < TOLERANCE[torch.float32]
        assert not relative_error(out, wrong) < 1e-3


def test_items_do_not_see_each_other(device):
    """Other values in one item change no bit of another."""
    case = make_case([(20, 20, [7, 9, 4])], (4, 2, 64), 16, torch.float32, device)
    before = (case.op(), case.launch(triton_config()))
    for tensor in (case.q, case.k_new, case.v_new):
        tensor[7:16] = torch.randn_like(tensor[7:16])
    for old, new in zip(before, (case.op(), case.launch(triton_config())), strict=True):
        assert torch.equal(old[:7], new[:7])
        assert torch.equal(old[16:], new[16:])
        assert not torch.isclose(old[7:16], new[7:16]).any(dim=1).all()


# ---- the CUDA kernel


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("variant", "dtype", "group", "block_size"),
    [
        ("plain", torch.bfloat16, 4, 64),
        ("fast", torch.bfloat16, 4, 64),
        ("plain", torch.float16, 4, 64),
        ("fast", torch.float16, 4, 64),
        ("plain", torch.bfloat16, 4, 16),
        ("fast", torch.bfloat16, 1, 64),
        ("plain", torch.bfloat16, 2, 128),
        ("fast", torch.bfloat16, 8, 32),
    ],
)
def test_cuda_matches_oracle(variant, dtype, group, block_size, device):
    kv_heads = 8 if group == 4 else 2
    for number, requests in enumerate(LARGE):
        for q_scale in (1.0, 12.0):  # 12: maxima keep growing, so that sums are rescaled
            case = make_case(
                requests,
                (kv_heads * group, kv_heads, 128),
                block_size,
                dtype,
                device,
                poison=FINITE,
                q_scale=q_scale,
            )
            out = case.launch(cuda_config(variant), heads_first=bool(number % 2))
            error = relative_error(out, case.expected())
            assert error < TOLERANCE[dtype], (requests, q_scale)
            again = case.launch(cuda_config(variant), heads_first=not number % 2)
            assert torch.equal(out, again), (requests, q_scale)
            expected, sums = case.expected_both()
            for steps in (1, 3, 1000):
                out, lse = case.launch(cuda_config(variant), steps=steps)
                assert relative_error(out, expected) < TOLERANCE[dtype], (requests, steps)
                # Scores of 12 times the size have sums of thousands of nats.
                assert_lse(lse, sums, 2e-2 if q_scale == 1 else 0.2)


@needs_hopper
@pytest.mark.gpu
def test_few_rows_on_a_long_prefix_are_cut_into_parts(device):
    """The op's own choice; bits do not depend on another item's tokens here either."""
    for items in ([16], [16] * 4, [5, 1, 40], [0, 3]):
        case = make_case([(4100, 4100, items)], (32, 8, 128), 64, torch.bfloat16, device)
        case.k_cache.nan_to_num_(FINITE)
        case.v_cache.nan_to_num_(FINITE)
        options = {"prefix_len": case.prefix_len, "item_start": case.item_start}
        lengths = (case.query_lens, case.context_lens)
        plan = plan_multi_item_attention(*lengths, num_heads=32, k_cache=case.k_cache, **options)
        assert plan.num_part_rows > len(case.q)
        lse = torch.full(case.q.shape[:2], float("nan"), device=device)
        expected, sums = case.expected_both()
        assert relative_error(case.op(lse=lse), expected) < TOLERANCE[torch.bfloat16]
        assert_lse(lse, sums, 2e-2)
        assert torch.equal(case.op(plan=plan), case.op())


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("prefix", [0, 100, 700, 4100])
@pytest.mark.parametrize("variant", ["plain", "fast"])
def test_items_of_the_cuda_kernel_do_not_see_each_other(variant, prefix, device):
    """Nor the growth of another item's maxima, which its warp may redo a step for."""
    items = [5, 1, 30, 64, 3, 200, 2, 2, 7]
    case = make_case([(prefix, prefix, items)], (32, 8, 128), 64, torch.bfloat16, device)
    case.k_cache.nan_to_num_(FINITE)
    case.v_cache.nan_to_num_(FINITE)

    def outs():
        cut, _ = case.launch(cuda_config(variant), steps=3)
        return case.launch(cuda_config(variant)), cut, case.op()

    before = outs()
    rows = slice(sum(items[:4]), sum(items[:5]))
    for factor in (1.0, 30.0):
        for tensor in (case.q, case.k_new, case.v_new):
            tensor[rows] = factor * torch.randn_like(tensor[rows])
        for old, new in zip(before, outs(), strict=True):
            assert torch.equal(old[: rows.start], new[: rows.start])
            assert torch.equal(old[rows.stop :], new[rows.stop :])
            assert not torch.equal(old[rows], new[rows])


@needs_hopper
@pytest.mark.gpu
def test_kernels_agree(device):
    case = make_case(LARGE[-2], (8, 2, 128), 64, torch.bfloat16, device, poison=FINITE)
    outs = [case.launch(config) for config in map(cuda_config, ("plain", "fast"))]
    outs.append(case.launch(triton_config(128, 64)))
    for out in outs:
        assert relative_error(out, case.expected()) < TOLERANCE[torch.bfloat16]


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 2, 128), (9, 3, 64)], ids=str)
def test_graph_replay_equals_eager(heads, device):
    case = make_case(LARGE[-2], heads, 64, torch.bfloat16, device, poison=FINITE)
    items = {"prefix_len": case.prefix_len, "item_start": case.item_start}
    lengths = (case.query_lens, case.context_lens)
    plan = plan_multi_item_attention(*lengths, num_heads=heads[0], k_cache=case.k_cache, **items)
    eager = case.op(plan=plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.op(plan=plan)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)


# ---- choice and plan


def test_select_knows_what_the_cuda_kernel_is_built_for():
    hopper = (9, 0)
    shape = (torch.bfloat16, 128, 4, 64, 0, 0.0, 100, hopper)
    select = kernel.select_multi_item_attention
    assert select(*shape).variant == "plain"
    assert select(*shape[:6], 2047, hopper).variant == "plain"
    assert select(*shape[:6], 2048, hopper).variant == "fast"
    assert select(torch.float16, *shape[1:]).variant == "plain"
    others = [
        (torch.float32, *shape[1:]),
        (shape[0], 64, *shape[2:]),
        (*shape[:2], 3, *shape[3:]),
        (*shape[:3], 48, *shape[4:]),
        (*shape[:4], 100, *shape[5:]),
        (*shape[:5], 30.0, *shape[6:]),
        (*shape[:7], (10, 0)),
        (*shape[:7], (8, 9)),
    ]
    assert {select(*other).variant for other in others} == {"triton"}


def test_select_tiles_hold_a_token_and_are_launchable():
    for dtype in TOLERANCE:
        for head_dim in (16, 40, 64, 96, 128, 192, 256, 512):
            for group in (1, 3, 7, 8, 64, 71):
                config = kernel.select_multi_item_attention(
                    dtype, head_dim, group, 64, 0, 0.0, 9, (8, 0)
                )
                assert config.block_m >= max(16, group)
                assert config.block_n >= 16
                assert 64 % config.block_n == 0  # one page per step
    with pytest.raises(ArgumentError, match="head_dim 513"):
        kernel.select_multi_item_attention(torch.float16, 513, 1, 64, 0, 0.0, 9, (8, 0))


@pytest.mark.parametrize("step", [1, 4, 32])
@pytest.mark.parametrize("requests", [*PLAIN.values(), *ITEMS.values(), *LARGE], ids=len)
def test_tiles_cover_what_is_visible(requests, step):
    """Every row once; every visible key in its tile's ranges, whose ends are visible to someone."""
    rows = [item_starts(*request) for request in requests]
    starts = np.fromiter(itertools.chain(*(own for own, _ in rows)), np.int32)
    contexts = [length for _, length in rows]
    queries = [length - request[0] for length, request in zip(contexts, requests, strict=True)]
    prefixes = [request[1] for request in requests]
    tiles = make_tiles(queries, contexts, prefixes, starts, step)
    bases = np.concatenate(([0], np.cumsum(queries)))
    masks = [
        oracle.make_mask(*lengths, torch.from_numpy(own)).numpy()
        for *lengths, own in zip(
            queries, contexts, prefixes, np.split(starts, bases[1:-1]), strict=True
        )
    ]
    seen_rows, costs = [], []
    for row, tokens, index, request, prefix, low, first, out_row in tiles.tolist():
        seen_rows += range(row, row + tokens)
        cached = contexts[request] - queries[request]
        assert index == row - bases[request] + cached
        mask = masks[request][index - cached : index - cached + tokens]
        end = index + tokens
        assert 0 < tokens <= step
        assert prefix == min(prefixes[request], contexts[request])
        walked = np.zeros(contexts[request], bool)
        walked[: min(prefix, end)] = True
        walked[low:end] = True
        assert not mask[:, ~walked].any()
        assert (first, out_row) == (0, row)
        costs.append(min(prefix, end) + end - low)
        assert costs[-1] > 0  # a tile without a step would store nothing
        assert low == end or low >= prefix
        # What is walked in vain: the key of each token that sees the prefix alone.
        own = starts[row : row + tokens]
        blind = (own == np.arange(index, end) + 1) & (np.arange(index, end) >= prefix)
        assert walked.sum() - mask.any(axis=0).sum() <= blind.sum()
    assert sorted(seen_rows) == list(range(sum(queries)))
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(
    ("prefix", "items", "length", "visited"),
    [
        (512, 128, 16, 320),
        (512, 128, 32, 640),
        (512, 512, 128, 10_240),
        (2048, 128, 32, 2_176),
        (8192, 128, 32, 8_320),
        (8192, 512, 128, 133_120),
    ],
)
def test_as_many_key_tiles_are_walked_as_an_exact_rule_asks_for(prefix, items, length, visited):
    """Of 128 keys, for 32 tokens a tile; the figures were counted apart from this code."""
    starts = np.repeat(prefix + length * np.arange(items), length).astype(np.int32)
    total = prefix + items * length
    tiles = make_tiles([total - prefix], [total], [prefix], starts, 32).astype(int)
    end = tiles[:, 1] + tiles[:, 2]
    pages, own = np.minimum(tiles[:, 4], end), end - tiles[:, 5]
    assert int((-(-pages // 128) + -(-own // 128)).sum()) == visited


@pytest.mark.parametrize("steps", [1, 2, 5, 99])
@pytest.mark.parametrize("requests", [*PLAIN.values(), *ITEMS.values(), *LARGE], ids=len)
def test_parts_cover_a_tile(requests, steps):
    """Each page key of a tile once, its items once, results in rows of their own."""
    rows = [item_starts(*request) for request in requests]
    starts = np.fromiter(itertools.chain(*(own for own, _ in rows)), np.int32)
    contexts = [length for _, length in rows]
    queries = [length - request[0] for length, request in zip(contexts, requests, strict=True)]
    tiles = make_tiles(queries, contexts, [request[1] for request in requests], starts, 8)
    cut, places = cut_tiles(tiles, steps, 8)
    used = []
    for row, tokens, index, request, prefix, low, _, _ in tiles.tolist():
        end = index + tokens
        own = cut[(cut[:, 0] == row)]
        assert (own[:, 1:4] == [tokens, index, request]).all()
        assert own[:, 5].tolist() == [low, *[end] * (len(own) - 1)]
        edges = own[:, 6].tolist()
        assert edges[0] == 0
        assert edges == sorted(set(edges))
        assert [*np.minimum(own[:, 4], end)] == [*edges[1:], min(prefix, end)]
        assert all(edge % 128 == 0 for edge in edges)
        lengths = -(-np.diff([*edges, min(prefix, end)]) // 128)
        assert lengths.max() <= steps
        assert lengths.max() - lengths.min() <= 1
        for t in range(tokens):
            first, count = places[row + t]
            mine = first + 8 * np.arange(count)
            assert mine.tolist() == (own[:, 7] + t).tolist()
            used += mine.tolist()
    assert len(set(used)) == len(used)
    assert max(used) < 8 * len(cut)


def test_parts_are_made_where_processors_would_idle():
    def steps_of(prefix, items, kv_heads=8):
        starts = np.repeat(prefix + 16 * np.arange(items), 16).astype(np.int32)
        total = prefix + 16 * items
        tiles = make_tiles([16 * items], [total], [prefix], starts, 32)
        return part_steps(tiles, kv_heads, 132)

    assert steps_of(512, 2) == 0, "nothing to gain"
    assert steps_of(8192, 32) == 0, "every processor has a tile"
    assert steps_of(8192, 512) == 0
    assert steps_of(8192, 2) == 4  # 64 steps by 8 heads: 16 parts
    assert steps_of(8192, 8) == 16
    assert steps_of(8192, 16) == 32
    assert steps_of(2048, 4) == 3
    assert steps_of(131072, 2, 1) == 8


# ---- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_new": None}, "not both k_new and v_new"),
        ({"item_start": None}, "do not both lie on the host"),
        ({"prefix_len": None}, "do not both lie on the host"),
        ({"prefix_len": [20]}, r"prefix_len \(20,\) and item_start \(15,\) int32 do not fit 2"),
        ({"prefix_len": [-1, 5]}, r"prefix_len \(-1, 5\)"),
        ({"starts": (14, 19)}, "item_start of request 0 at index 29 is 19"),
        ({"starts": (14, 31)}, "item_start of request 0 at index 29 is 31"),
        ({"starts": (11, 21)}, "item_start of request 0 at index 26 is 21"),
        ({"window": -1}, "scale=0.15, window=-1 and softcap=0.0"),
        ({"softcap": -2.0}, "scale=0.15, window=0 and softcap=-2.0"),
        ({"softcap": float("nan")}, "softcap=nan"),
        ({"lse": torch.zeros(15, 2)}, r"lse is torch.float32 \(15, 2\)"),
        ({"lse": torch.zeros(15, 4).half()}, r"lse is torch.float16"),
        ({"k_new": "short"}, r"k_new has shape \(14, 2, 64\)"),
    ],
    ids=str,
)
def test_op_names_the_bad_items(changes, message, device):
    case = make_case([(16, 20, [4, 6]), (4, 5, [])], (4, 2, 64), 16, torch.float32, device)
    changes = dict(changes)
    if "starts" in changes:
        row, value = changes.pop("starts")
        case.item_start[row - 1] = value
    if changes.get("k_new") == "short":
        changes["k_new"] = case.k_new[1:]
    with pytest.raises(ArgumentError, match=message):
        case.op(**changes)


def test_an_item_lies_in_one_step(device):
    case = make_case([(16, 20, [4, 6])], (4, 2, 64), 16, torch.float32, device)
    cut = replace(case, q=case.q[6:], query_lens=[8], k_new=case.k_new[6:], v_new=case.v_new[6:])
    cut = replace(cut, item_start=case.item_start[6:])
    with pytest.raises(ArgumentError, match="request 0 at index 22 is 20") as error:
        cut.op()
    assert "From index 22 on" in error.value.hint


def test_op_names_the_bad_argument(device):
    case = make_case([(3, 5, [])], (9, 3, 64), 16, torch.float32, device)

    def call(match, **changes):
        bad = replace(case, **changes)
        plain = {"prefix_len": None, "item_start": None, "k_new": None, "v_new": None}
        with pytest.raises(ArgumentError, match=match):
            bad.op(**plain)

    call(r"q \(2, 8, 64\) does not fit a cache of", q=case.q[:, :8])
    call(r"q \(2, 9, 32\)", q=case.q[..., :32])
    call("q has 1 tokens, query_lens 2", q=case.q[:1])
    call(r"query_lens \[?\(?6", query_lens=[6])
    call(r"query_lens", query_lens=[0])
    call(r"query_lens", context_lens=[5, 5])
    call("hold too few blocks", tables=case.tables[:, :0])
    call(r"block_tables \(2, 2\)", tables=case.tables.repeat(2, 1))
    call("block_tables are torch.int64", tables=case.tables.long())
    call("not equal and contiguous", v_cache=case.v_cache[:1])
    strided = case.v_cache.transpose(0, 1).contiguous().transpose(0, 1)
    call("not equal and contiguous", v_cache=strided)
    call("tensors are of", q=case.q.half())
