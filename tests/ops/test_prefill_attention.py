"""Prefill attention: pages, chunks, windows and items, on the CPU and in Triton."""

from dataclasses import replace

import pytest
import torch

from tests.ops.prefill_attention_cases import (
    HEADS,
    ITEMS,
    LARGE,
    PLAIN,
    SCALE,
    TOLERANCE,
    WINDOWS,
    assert_lse,
    make_case,
    relative_error,
    triton_config,
)
from tiercel.errors import ArgumentError
from tiercel.kernels.attention import prefill_attention as kernel
from tiercel.ops.prefill_attention import plan_prefill_attention, prefill_attention
from tiercel.reference import prefill_attention as oracle

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


# By default each request without either, or with both.
WITHOUT_AND_WITH = ((0, 0.0), (6, SOFTCAP))
SOFTCAP_CASES = [
    pytest.param(
        *(requests, window, softcap),
        marks=[pytest.mark.slow] * ((window, softcap) != WITHOUT_AND_WITH[number % 2]),
        id=f"{name}-{window}-{softcap}",
    )
    for number, (name, requests) in enumerate((PLAIN | ITEMS).items())
    for window, softcap in ((0, 0.0), (0, SOFTCAP), (6, SOFTCAP))
]


@pytest.mark.parametrize(("requests", "window", "softcap"), SOFTCAP_CASES)
def test_soft_caps_and_sums_match_oracle(requests, window, softcap, device):
    """The op's own choice of a kernel, and the Triton kernel in parts of one step."""
    case = make_case(requests, (9, 3, 64), 16, torch.float32, device)
    expected, sums = case.expected_both(window, softcap)
    lse = torch.full(case.q.shape[:2], float("nan"), device=device)
    out = case.op(window, softcap=softcap, lse=lse)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]
    assert_lse(lse, sums, LSE_TOLERANCE)
    assert relative_error(case.op(window, softcap=softcap), expected) < TOLERANCE[torch.float32]
    if not softcap:
        return  # its parts: the test below
    for steps in (99,) if window else (1, 99):  # windows are never cut: a part's end is not P
        out, lse = case.launch(triton_config(), window, softcap=softcap, steps=steps)
        assert relative_error(out, expected) < TOLERANCE[torch.float32]
        assert_lse(lse, sums, LSE_TOLERANCE)
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
        case = make_case(requests, shape, 64, dtype, device)
        assert relative_error(case.op(), case.expected()) < TOLERANCE[dtype]
    case = make_case(LARGE[-2], shape, 64, dtype, device)
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


def test_where_all_is_prefix_there_are_no_items(device):
    """Their starts are not read then, and no keys of this step are needed."""
    case = make_case(PLAIN["mixed"], (9, 3, 64), 64, torch.float32, device)
    starts = torch.full_like(case.item_start, 10**6)
    for more in (0, 7):
        prefixes = [length + more for length in case.context_lens]
        out = case.op(prefix_len=prefixes, item_start=starts, k_new=None, v_new=None)
        assert relative_error(out, case.expected()) < TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32, 8, 128), (9, 3, 64)], ids=str)
def test_a_plan_serves_all_layers(shape, device):
    for requests in (PLAIN["mixed"], ITEMS["among plain requests"]):
        first, second = (make_case(requests, shape, 64, torch.bfloat16, device) for _ in "ab")
        items = {"prefix_len": first.prefix_len, "item_start": first.item_start}
        lengths = (first.query_lens, first.context_lens)
        plan = plan_prefill_attention(*lengths, num_heads=shape[0], k_cache=first.k_cache, **items)
        for case in (first, second, first):
            assert torch.equal(case.op(plan=plan), case.op())
        other = make_case([(0, 70, [])], shape, 64, torch.bfloat16, device)
        with pytest.raises(ArgumentError, match="the plan is of"):
            other.op(plan=plan)


def test_a_cpu_needs_no_plan():
    cache = torch.zeros(3, 16, 2, 8)
    assert plan_prefill_attention([3], [5], num_heads=4, k_cache=cache) is None


def test_no_requests(device):
    cache = torch.zeros(4, 16, 3, 64, device=device)
    q, tables = torch.empty(0, 9, 64, device=device), torch.zeros(0, 4, device=device).int()
    assert prefill_attention(q, cache, cache, tables, [], [], 0.1).shape == (0, 9 * 64)


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
        pytest.param(*((9, 3, 64), 64, 0, (16, 16), torch.float16), marks=pytest.mark.slow),
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
    config = kernel.select_prefill_attention(dtype, head_dim, 3, 64, 0, 0.0, 100, (8, 0))
    large = [LARGE[3], LARGE[-2]] if device.type == "cuda" else [[(100, 190, []), (5, 70, [9, 40])]]
    for requests in large:
        case = make_case(requests, shape, 64, dtype, device)
        for heads_first in (True, False):
            out = case.launch(config, heads_first=heads_first)
            assert relative_error(out, case.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("window", "is_item"),
    [(0, True), (1, False), (5, True), (22, False)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((0, False), (1, True), (5, False), (22, True))
    ],
)
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
    wrong, _ = oracle.prefill_attention(
        case.q, keys, values, case.query_lens, SCALE, window, prefix, starts
    )
    right = case.expected(6)
    for out in (case.op(6), case.launch(triton_config(), 6)):
        assert relative_error(out, right) < TOLERANCE[torch.float32]
        assert relative_error(out, wrong) > 1e-3


def test_items_do_not_see_each_other(device):
    """Other values in one item change no bit of another."""
    case = make_case([(20, 20, [7, 9, 4])], (4, 2, 64), 16, torch.float32, device)
    before = (case.op(), case.launch(triton_config()))
    for tensor in (case.q, case.k_new, case.v_new):
        tensor[7:16] = torch.randn_like(tensor[7:16])
    for old, new in zip(before, (case.op(), case.launch(triton_config())), strict=True):
        assert torch.equal(old[:7], new[:7])
        assert torch.equal(old[16:], new[16:])
        assert (old[7:16] - new[7:16]).abs().max() > 1e-2


# ---- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_new": None}, "not both k_new and v_new"),
        ({"item_start": None}, "are not both on the host"),
        ({"prefix_len": None}, "are not both on the host"),
        ({"prefix_len": [20]}, r"prefix_len \(20,\) and item_start \(15,\) int32 do not fit 2"),
        ({"prefix_len": [-1, 5]}, r"prefix_len \(-1, 5\)"),
        (
            {"item_start": torch.zeros(14).int()},
            r"item_start \(14,\) int32 do not fit 2 requests, 15",
        ),
        ({"item_start": torch.zeros(15).long()}, r"item_start \(15,\) int64 do not fit"),
        ({"prefix_len": [20, 5, 5]}, r"prefix_len \(20, 5, 5\)"),
        ({"starts": (14, 19)}, "item_start of request 0 at index 29 is 19"),
        ({"starts": (14, 31)}, "item_start of request 0 at index 29 is 31"),
        ({"starts": (11, 21)}, "item_start of request 0 at index 26 is 21"),
        ({"starts": (11, 23)}, "item_start of request 0 at index 26 is 23"),
        ({"window": -1}, "scale=0.15, window=-1 and softcap=0.0"),
        ({"scale": 0.0}, "scale=0.0, window=0 and softcap=0.0"),
        ({"scale": -0.1}, "scale=-0.1, window=0"),
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
    call(r"query_lens \(0,\) do not fit context_lens \(5,\)", query_lens=[0])
    call(r"query_lens \(2,\) do not fit context_lens \(5, 5\)", context_lens=[5, 5])
    call("hold too few blocks", tables=case.tables[:, :0])
    call(r"block_tables \(2, 2\)", tables=case.tables.repeat(2, 1))
    call("block_tables are torch.int64", tables=case.tables.long())
    call("not equal and contiguous", v_cache=case.v_cache[:1])
    strided = case.v_cache.transpose(0, 1).contiguous().transpose(0, 1)
    call("not equal and contiguous", v_cache=strided)
    call("tensors are of", q=case.q.half())
