"""Two tokens in one launch of a whole decode step: each has the bits that it has alone."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from benchmarks.fused_decode_step import alone
from tests import fused_decode_step_on_cpu
from tests.fused_decode_step_model import V_AND_DOWN, make_shape
from tests.ops.test_fused_decode_step import (
    ALL_Q5,
    ALL_Q6,
    ALL_Q8,
    IQ4_M,
    ODD,
    SHAPES,
    SMALL_BLOCKS,
    make_sized,
    step,
)
from tiercel.batch import Batch
from tiercel.errors import ArgumentError
from tiercel.kernels.fused.fused_decode_step_geometry import BLOCK_TOKENS, make_geometry
from tiercel.ops.fused_decode_step import Refusal, fused_decode_step, prepare_caches, refuse_pairs

CPU = torch.device("cpu")
ROWS = (2, 0)  # of the requests among 4
POSITIONS = (5, 9)


def make_pair(lengths, device, *, is_one=False):
    """Two requests of some lengths, or one of the last length with two new tokens."""
    lengths = lengths[1:] if is_one else lengths
    most = -(-max(lengths) // BLOCK_TOKENS)
    free = [torch.randperm(2 * most) + 1 for _ in range(2)]  # of full layers and of sliding ones
    tables = torch.zeros((2, 4, most + 2), dtype=torch.int32)
    slots = torch.zeros((2, 2), dtype=torch.int64)
    for request, length in enumerate(lengths):
        for group in range(2):
            blocks = free[group][request * most : (request + 1) * most]
            tables[group, ROWS[request], :most] = blocks
            for token in range(2) if is_one else (request,):
                place = length - 1 - (1 - token if is_one else 0)
                slots[group, token] = blocks[place // BLOCK_TOKENS] * BLOCK_TOKENS
                slots[group, token] += place % BLOCK_TOKENS
    requests = len(lengths)

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Batch(
        input_ids=ints((0, 0)),
        positions=ints(POSITIONS),
        cu_seqlens_q=ints((0, 2) if is_one else (0, 1, 2)),
        seq_lens=ints(lengths),
        rows=ints(ROWS[:requests]),
        logits_rows=ints((0, 1)),
        slot_mapping=slots.to(device),
        block_tables=tables.to(device),
        query_lens=(2,) if is_one else (1, 1),
        context_lens=tuple(lengths),
        num_tokens=2,
        num_reqs=requests,
        max_query_len=2 // requests,
        max_seq_len=max(lengths),
    ), 2 * most + 1


def make_planes(model, num_blocks, batch, device):
    """Caches that are random where a token reads and NaN elsewhere, also in new tokens' slots."""
    shape = model.weights.geometry.shape
    size = (num_blocks, BLOCK_TOKENS, shape.num_kv_heads, shape.head_dim)
    sides = []
    for _ in range(2):
        planes = []
        for slides in shape.sliding or (False,) * len(model.layers):
            plane = torch.full(size, float("nan"), dtype=torch.float16, device=device)
            for token in range(2):
                own = alone(batch, token)
                table = own.block_tables[int(slides), own.rows[0]].long()
                length = own.context_lens[0]
                first = max(0, length - shape.window) if slides else 0
                tokens = torch.arange(first, length - 1, device=device)
                seen = table[tokens // BLOCK_TOKENS] * BLOCK_TOKENS + tokens % BLOCK_TOKENS
                values = torch.randn(len(seen), *size[2:], device=device).half()
                plane.flatten(0, 1)[seen] = values
            new = batch.slot_mapping[int(slides)]
            plane.flatten(0, 1)[new] = float("nan")
            planes.append(plane)
        sides.append(planes)
    return sides


def check_pair(run, model, lengths, device, *, is_one):
    """run(x, k, v, batch): the pair against its tokens one after the other, bit by bit."""
    batch, num_blocks = make_pair(lengths, device, is_one=is_one)
    planes = make_planes(model, num_blocks, batch, device)
    x = torch.randn(2, model.weights.geometry.shape.hidden_size, device=device)
    together, apart = ([[plane.clone() for plane in side] for side in planes] for _ in range(2))
    found = run(x, *together, batch)
    expected = [run(x[t : t + 1].contiguous(), *apart, alone(batch, t)) for t in range(2)]
    assert found.isfinite().all()
    assert torch.equal(found, torch.cat(expected))
    for sides in zip(together, apart, strict=True):
        for own, other in zip(*sides, strict=True):
            assert torch.equal(own.view(torch.int16), other.view(torch.int16))


@pytest.fixture(scope="module")
def build_sources(tmp_path_factory):
    """Compiles the source for one token and for two on a processor; once for each model."""

    @functools.cache
    def build(name, masks):
        model = make_sized(name, masks)
        libraries = [
            fused_decode_step_on_cpu.build(
                model.weights.geometry,
                tmp_path_factory.mktemp("step"),
                has_qk_norm=model.weights.head_norms is not None,
                has_bias=model.weights.bias is not None,
                tokens=tokens,
            )
            for tokens in (1, 2)
        ]
        return model, libraries

    return build


def check_source(build_sources, name, masks, lengths, *, is_one, seed=0):
    model, libraries = build_sources(name, masks)

    def run(x, k, v, batch):
        library = libraries[len(x) - 1]
        return fused_decode_step_on_cpu.run(library, x, model.weights, k, v, batch, seed=seed)

    check_pair(run, model, lengths, CPU, is_one=is_one)


# Of one request the border of a warp's keys, of a tile and of a block is between its tokens.
@pytest.mark.parametrize(
    ("name", "masks", "lengths", "is_one"),
    [
        # Heads of 64, biases, several rows a warp.
        pytest.param("tiny", (0, ALL_Q6), (0, 66), True, id="tiny"),
        # Heads of 256, a window, norms of updates, GELU, other types.
        pytest.param("gemma", SMALL_BLOCKS, (90, 400), False, id="gemma"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("whole", (V_AND_DOWN,), (1, 70), False),
                ("rows", (ALL_Q5,), (0, 43), True),
                *(("tiny", (0, ALL_Q6), lengths, False) for lengths in ((1, 1), (2500, 3))),
                *(("tiny", (0, ALL_Q6), (0, length), True) for length in (2, 10, 34, 65, 2500)),
                ("gemma", SMALL_BLOCKS, (0, 330), True),
                ("gemmas", (V_AND_DOWN, 0), (41, 300), False),
                ("gemmas", (V_AND_DOWN, 0), (0, 80), True),
                ("rows", (IQ4_M,), (600, 70), False),
                ("lanes", SMALL_BLOCKS, (70, 33), False),
                *(
                    (name, (V_AND_DOWN,), (600, 70), is_one)
                    for name in ("slices", "wide", "widest", "llama", "qwen2", "heads", "teams")
                    for is_one in (False, True)
                ),
            )
        ),
    ],
    ids=str,
)
def test_source_gives_each_token_its_bits(name, masks, lengths, is_one, build_sources):
    check_source(build_sources, name, masks, lengths, is_one=is_one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows", "wide", "gemmas"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_source_of_two_in_any_order_of_warps(build_sources, seed, name):
    check_source(build_sources, name, (V_AND_DOWN,), (70, 2500), is_one=seed % 2 == 0, seed=seed)


@pytest.mark.parametrize("is_one", [False, True])
def test_the_op_gives_each_token_its_bits_on_a_cpu(is_one):
    model = make_sized("tiny", (V_AND_DOWN,), most_tokens=2)
    check_pair(
        lambda x, k, v, batch: step(x, model, k, v, batch), model, (70, 33), CPU, is_one=is_one
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("is_one", [False, True])
def test_each_token_has_its_bits(name, is_one, device):
    """At every size and depth, as the kernel of one token gives them."""
    masks = SMALL_BLOCKS * 2 if name in ODD else (V_AND_DOWN, 0, ALL_Q6, ALL_Q5, IQ4_M, ALL_Q8)
    model = make_sized(name, masks, device, most_tokens=2)
    for lengths in ((1, 2), (9, 33), (70, 34), (1000, 65), (2500, 513), (3, 9000)):
        check_pair(
            lambda x, k, v, batch: step(x, model, k, v, batch),
            model,
            lengths,
            device,
            is_one=is_one,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("is_one", [False, True])
def test_replays_of_pairs_have_the_bits_of_a_launch(is_one, device):
    model = make_sized("wide", (V_AND_DOWN, 0), device, most_tokens=2)
    batch, num_blocks = make_pair((300, 900), device, is_one=is_one)
    k, v = make_planes(model, num_blocks, batch, device)
    caches = prepare_caches(model.weights.geometry, k, v)
    x = torch.randn(2, 4352, device=device)
    expected = fused_decode_step(x, model.weights, caches, batch, (0, 1)).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_decode_step(x, model.weights, caches, batch, (0, 1))
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def test_wrong_tokens():
    model = make_sized("tiny", (0,))
    batch, num_blocks = make_pair((3, 4), CPU)
    k, v = make_planes(model, num_blocks, batch, CPU)
    with pytest.raises(ArgumentError, match=r"for 2 tokens of 2 requests"):
        step(torch.zeros(2, 512), model, k, v, batch)


def test_why_a_model_takes_no_pairs(monkeypatch):
    """By default none does; the switch helps neither ranks nor where shared memory is too small."""
    geometry = make_geometry(SHAPES["tiny"], (0,))
    monkeypatch.delenv("TIERCEL_MEGAKERNEL_PAIRS", raising=False)
    reason = "not timed on a GPU; TIERCEL_MEGAKERNEL_PAIRS=1 uses it"
    assert refuse_pairs(geometry) == Refusal(reason)
    monkeypatch.setenv("TIERCEL_MEGAKERNEL_PAIRS", "1")
    assert refuse_pairs(geometry) is None
    shared = make_geometry(replace(SHAPES["tiny"], ranks=2), (0,))
    assert refuse_pairs(shared) == Refusal("sums over 2 GPUs are those of one token")
    many = make_geometry(make_shape(hidden=1024, heads=80, kv_heads=80, head_dim=64), (0,))
    reason = "80 groups of query heads leave no shared memory for two tokens"
    assert refuse_pairs(many) == Refusal(reason)
