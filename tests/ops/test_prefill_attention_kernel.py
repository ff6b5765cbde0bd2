"""Prefill attention on Hopper, which kernel is chosen, and the tiles that it walks."""

import itertools

import numpy as np
import pytest
import torch

from tests.ops.prefill_attention_cases import (
    ITEMS,
    LARGE,
    PLAIN,
    TOLERANCE,
    assert_lse,
    cuda_config,
    item_starts,
    make_case,
    relative_error,
    triton_config,
)
from tiercel.errors import ArgumentError
from tiercel.kernels.attention import prefill_attention as kernel
from tiercel.kernels.attention.prefill_attention_tiles import cut_tiles, make_tiles, part_steps
from tiercel.ops.prefill_attention import plan_prefill_attention
from tiercel.reference import prefill_attention as oracle

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")


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
        options = {"prefix_len": case.prefix_len, "item_start": case.item_start}
        lengths = (case.query_lens, case.context_lens)
        plan = plan_prefill_attention(*lengths, num_heads=32, k_cache=case.k_cache, **options)
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
            assert (old[rows] - new[rows]).abs().max() > 0


@needs_hopper
@pytest.mark.gpu
def test_kernels_agree(device):
    case = make_case(LARGE[-2], (8, 2, 128), 64, torch.bfloat16, device)
    outs = [case.launch(config) for config in map(cuda_config, ("plain", "fast"))]
    outs.append(case.launch(triton_config(128, 64)))
    for out in outs:
        assert relative_error(out, case.expected()) < TOLERANCE[torch.bfloat16]


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 2, 128), (9, 3, 64)], ids=str)
def test_graph_replay_equals_eager(heads, device):
    case = make_case(LARGE[-2], heads, 64, torch.bfloat16, device)
    items = {"prefix_len": case.prefix_len, "item_start": case.item_start}
    lengths = (case.query_lens, case.context_lens)
    plan = plan_prefill_attention(*lengths, num_heads=heads[0], k_cache=case.k_cache, **items)
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
    select = kernel.select_prefill_attention
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
                config = kernel.select_prefill_attention(
                    dtype, head_dim, group, 64, 0, 0.0, 9, (8, 0)
                )
                assert config.block_m >= max(16, group)
                assert config.block_n >= 16
                assert 64 % config.block_n == 0  # one page per step


def test_a_head_that_does_not_fit_a_tile_is_refused_before_the_launch(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    k_cache = torch.empty(1, 64, 1, 513)
    with pytest.raises(ArgumentError, match="head_dim 513"):
        plan_prefill_attention([9], [9], num_heads=1, k_cache=k_cache)


def lengths_of(requests):
    """item_start of all new tokens, and each request's keys and new tokens."""
    rows = [item_starts(*request) for request in requests]
    starts = np.fromiter(itertools.chain(*(own for own, _ in rows)), np.int32)
    contexts = [length for _, length in rows]
    queries = [length - request[0] for length, request in zip(contexts, requests, strict=True)]
    return starts, contexts, queries


@pytest.mark.parametrize("step", [1, 4, 32])
@pytest.mark.parametrize("requests", [*PLAIN.values(), *ITEMS.values(), *LARGE], ids=len)
def test_tiles_cover_what_is_visible(requests, step):
    """Every row once; every visible key in its tile's ranges, whose ends are visible to someone."""
    starts, contexts, queries = lengths_of(requests)
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
    starts, contexts, queries = lengths_of(requests)
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
