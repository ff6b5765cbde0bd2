"""Native attention against float64 oracles, and a token's bits in all kinds of steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.native.attention_cases import (
    Part,
    Shape,
    Step,
    fill_cache,
    make_rows,
    make_step,
    read_cache,
    run_step,
)
from tiercel.kernels.native.library import variants
from tiercel.reference import prefill_attention as attention_oracle
from tiercel.reference import rms_norm as rms_norm_oracle
from tiercel.reference import rotary_kv_write as rotary_oracle

CACHE_ROUNDING = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
TOLERANCE = 4e-6  # results are averages of values around 1

pytestmark = pytest.mark.parametrize("variant", variants())


def expected_heads(step: Step, heads: Tensor) -> Tensor:
    """Queries, keys and values after norm and rotation, float64; quicker than the oracle."""
    kv, half = step.shape.num_kv_heads, step.shape.half
    queries, keys, values = heads.double().tensor_split((-2 * kv, -kv), dim=1)
    if step.norms is not None:
        queries, keys = (
            rms_norm_oracle.rms_norm(x, weight, 1e-5)
            for x, weight in zip((queries, keys), step.norms, strict=True)
        )
    x = torch.cat((queries, keys), dim=1)
    turn = torch.polar(torch.ones((), dtype=torch.float64), step.angles[step.positions.long()])
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn.unsqueeze(1)
    return torch.cat(
        (torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), dim=2), values), dim=1
    )


def check(shape: Shape, parts: list[Part], variant: str, num_threads: int = 2) -> Step:
    """Run a step with random cached keys, and compare cache and result with the oracles."""
    step = make_step(shape, parts)
    cached = [make_rows(shape, len(part.rows), 100 + i) for i, part in enumerate(parts)]
    kv = shape.num_kv_heads
    fill_cache(step, parts, [(c[:, -2 * kv : -kv], c[:, -kv:]) for c in cached])
    before = step.k_cache.clone(), step.v_cache.clone(), step.heads.clone()
    out = run_step(step, variant, num_threads)
    heads = expected_heads(step, before[2])
    _check_cache(step, before[:2], heads)
    keys, values = [], []
    for request, part in enumerate(parts):
        k, v = read_cache(step, request)
        own = slice(
            int(step.starts[request]) + len(part.rows) - part.start, int(step.starts[request + 1])
        )
        keys.append(torch.cat((k.double(), heads[own, -2 * kv : -kv].to(shape.dtype).double())))
        values.append(torch.cat((v.double(), heads[own, -kv:].to(shape.dtype).double())))
    expected, _ = attention_oracle.prefill_attention(
        heads[:, : shape.num_heads],
        keys,
        values,
        step.starts.diff().tolist(),
        shape.scale,
        shape.window,
        None if step.prefix_len is None else step.prefix_len.tolist(),
        step.item_start,
    )
    # A key of an item may round to the neighbour of the oracle's.
    tolerance = (
        TOLERANCE if step.prefix_len is None else max(TOLERANCE, CACHE_ROUNDING[shape.dtype] / 4)
    )
    torch.testing.assert_close(out.flatten(1).double(), expected, rtol=tolerance, atol=tolerance)
    return step


def _check_cache(step: Step, before: tuple[Tensor, Tensor], heads: Tensor) -> None:
    kv, rounding = step.shape.num_kv_heads, CACHE_ROUNDING[step.shape.dtype]
    written = step.slots >= 0
    slots = step.slots[written]
    for cache, old, new in zip(
        (step.k_cache, step.v_cache), before, (heads[:, -2 * kv : -kv], heads[:, -kv:]), strict=True
    ):
        flat = cache.flatten(0, 1)
        torch.testing.assert_close(flat[slots].double(), new[written], rtol=rounding, atol=rounding)
        others = torch.ones(len(flat), dtype=torch.bool)
        others[slots] = False
        torch.testing.assert_close(
            flat[others], old.flatten(0, 1)[others], rtol=0, atol=0, equal_nan=True
        )


SHAPES = [
    Shape(),
    Shape(dtype=torch.float32, has_norm=True, block_size=7),
    Shape(dtype=torch.bfloat16, num_heads=4, num_kv_heads=1, head_dim=80, half=16, block_size=32),
    Shape(num_heads=2, num_kv_heads=2, head_dim=96, half=48, has_norm=True),
    Shape(num_heads=8, num_kv_heads=1, head_dim=128, half=64, window=70),
    Shape(num_heads=17, num_kv_heads=1, head_dim=24, half=5, window=300),
    Shape(num_heads=4, num_kv_heads=2, head_dim=256, half=64, dtype=torch.bfloat16),
    Shape(num_heads=6, num_kv_heads=2, head_dim=21, half=10, has_norm=True),
    Shape(num_heads=70, num_kv_heads=1, head_dim=8, half=4, dtype=torch.float32),
    Shape(num_heads=5, num_kv_heads=1, head_dim=13, half=0, dtype=torch.float32),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keys_and_values_are_written(shape: Shape, variant: str) -> None:
    for count in (1, 20):  # in the task of attention, and in one before it
        rows = make_rows(shape, 9 + count, 1)
        step = make_step(shape, [Part(rows, 9)])
        fill_cache(step, [Part(rows, 9)], [(rows[:, : shape.num_kv_heads],) * 2])
        before = step.k_cache.clone(), step.v_cache.clone()
        run_step(step, variant)
        caches = [cache.double() for cache in before]
        heads = rotary_oracle.rotary_kv_write(
            rows[9:], step.angles[9 : 9 + count], *caches, step.slots, step.norms, 1e-5
        )
        torch.testing.assert_close(expected_heads(step, rows[9:]), heads)
        _check_cache(step, before, heads)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoding_matches_the_oracle(shape: Shape, variant: str) -> None:
    lengths = [(0, 1), (1, 1), (62, 1), (63, 1), (255, 1), (300, 3), (700, 2)]
    parts = [Part(make_rows(shape, a + b, i), a) for i, (a, b) in enumerate(lengths)]
    check(shape, parts, variant)
    check(shape, parts[-1:], variant)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_match_the_oracle(shape: Shape, variant: str) -> None:
    lengths = [(0, 1), (0, 70), (250, 21), (5, 300)]
    parts = [Part(make_rows(shape, a + b, i), a) for i, (a, b) in enumerate(lengths)]
    check(shape, parts, variant)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_items_match_the_oracle(shape: Shape, variant: str) -> None:
    def items(*lengths: int) -> tuple[Tensor, ...]:
        return tuple(make_rows(shape, count, 900 + count) for count in lengths)

    parts = [
        Part(make_rows(shape, 70, 1), 40, items(3, 1, 90, 30)),
        Part(make_rows(shape, 300, 2), 300, items(5, 64)),
        Part(make_rows(shape, 21, 3), 18),
        Part(make_rows(shape, 33, 4), 33, items(2), alone=make_rows(shape, 3, 5)),
        Part(make_rows(shape, 0, 6), 0, items(4, 9), alone=make_rows(shape, 1, 7)),
    ]
    check(shape, parts, variant)


def alone(shape: Shape, rows: Tensor, variant: str) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Result and cache of a sequence as one prompt."""
    step = make_step(shape, [Part(rows, 0)])
    out = run_step(step, variant)
    return out, read_cache(step, 0)


INVARIANT = [
    Shape(),
    Shape(has_norm=True, window=100, dtype=torch.bfloat16),
    Shape(num_heads=8, num_kv_heads=2, head_dim=36, half=18, dtype=torch.float32, block_size=5),
    Shape(num_heads=4, num_kv_heads=4, head_dim=128, half=64, window=300),
]


@pytest.mark.parametrize("shape", INVARIANT, ids=str)
def test_a_tokens_bits_do_not_depend_on_the_step(shape: Shape, variant: str) -> None:
    rows = make_rows(shape, 600, 1)
    whole, cache = alone(shape, rows, variant)
    other = make_rows(shape, 400, 2)
    other_cache = alone(shape, other, variant)[1]
    for start, count in [
        (0, 257),
        (257, 1),
        (258, 16),
        (274, 17),
        (291, 200),
        (491, 108),
        (599, 1),
    ]:
        own = Part(rows[: start + count], start)
        beside = [own, Part(other, 399), Part(other[:190], 60), Part(other[:6], 0)]
        for parts, threads in (([own], 1), ([own], 5), (beside[:2], 2), (beside[::-1], 3)):
            caches = [cache if part is own else other_cache for part in parts]
            step = make_step(shape, parts, seed=start)
            fill_cache(step, parts, caches)
            out = run_step(step, variant, threads)
            request = next(i for i, part in enumerate(parts) if part is own)
            result = out[int(step.starts[request]) : int(step.starts[request + 1])]
            assert torch.equal(result, whole[start : start + count])
            for new, old in zip(read_cache(step, request), cache, strict=True):
                assert torch.equal(new, old[: start + count])


@pytest.mark.parametrize("shape", INVARIANT, ids=str)
def test_an_item_has_the_bits_of_a_prompt_that_ends_with_it(shape: Shape, variant: str) -> None:
    prefix = make_rows(shape, 290, 1)
    items = tuple(make_rows(shape, count, 50 + count) for count in (3, 40, 1, 100, 7))
    parts = [Part(prefix[:20], 3), Part(prefix, 250, items)]
    cache = alone(shape, prefix, variant)[1]
    step = make_step(shape, parts)
    fill_cache(step, parts, [cache, cache])
    packed = run_step(step, variant)
    at = int(step.starts[1]) + 40
    for item in items:
        together, _ = alone(shape, torch.cat((prefix, item)), variant)
        assert torch.equal(packed[at : at + len(item)], together[290:])
        at += len(item)


def test_a_token_without_a_slot_writes_nothing(variant: str) -> None:
    shape = Shape()
    parts = [Part(make_rows(shape, 30, 1), 29), Part(make_rows(shape, 20, 2), 18)]
    for case in (parts, [*parts, Part(make_rows(shape, 50, 3), 0)]):
        step = make_step(shape, case)
        cached = make_rows(shape, 64, 4)[:, :3]
        fill_cache(step, case, [(cached, cached)] * len(case))
        step.slots[0] = -1
        before = step.k_cache.clone()
        run_step(step, variant)
        wrote = ~((step.k_cache == before) | (step.k_cache.isnan() & before.isnan())).flatten(2)
        assert wrote.any(dim=2).flatten().nonzero().flatten().tolist() == sorted(
            step.slots[1:].tolist()
        )


def test_large_scores_give_the_largest_keys_value(variant: str) -> None:
    shape = replace(Shape(), dtype=torch.float32)
    rows = make_rows(shape, 300, 1)
    rows[:, :12] *= 1e4  # scores of around 1e8
    step = make_step(shape, [Part(rows, 0)])
    out = run_step(step, variant)
    heads = expected_heads(step, rows)
    k, v = (x.double() for x in read_cache(step, 0))
    scores = torch.einsum("thd,khd->thk", heads[:, :9], k.repeat_interleave(3, 1))
    scores = scores.masked_fill(torch.ones(300, 300).triu(1).bool().unsqueeze(1), -torch.inf)
    top = scores.topk(2, dim=2)
    clear = (top.values[..., 0] - top.values[..., 1]) > 1e-4 * top.values[..., 0].abs() + 1e3
    assert clear.float().mean() > 0.9
    best = v.repeat_interleave(3, 1)[top.indices[..., 0], torch.arange(9)]
    torch.testing.assert_close(out[clear].double(), best[clear], rtol=1e-6, atol=1e-6)
