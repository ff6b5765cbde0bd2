"""A whole decode step in one launch: against the oracle, at every depth, with the same bits."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests import fused_decode_step_on_cpu
from tests.fused_decode_step_model import EPS, POSITIONS, ROWS, SCALE, V_AND_DOWN, make_model
from tiercel.batch import Batch
from tiercel.errors import ArgumentError
from tiercel.kernels.fused import fused_decode_step_stream
from tiercel.kernels.fused.fused_decode_step_geometry import (
    BLOCK_TOKENS,
    HEAD,
    HIDDEN,
    KV_HEADS,
    MATRICES,
)
from tiercel.ops.fused_decode_step import (
    FusedDecodeStepBuilder,
    fused_decode_step,
    prepare_caches,
)
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import fused_decode_step as oracle

CPU = torch.device("cpu")
# Of a layer. A code of 8 bits that falls on the other side changes an input by 1 / 127 of the
# largest in its group.
TOLERANCE = 1.5e-2


def make_batch(length, device, *, num_blocks=0, row=2, position=5):
    """One request in row 2 of 4 whose blocks are in any order; its last token is new."""
    needed = -(-length // BLOCK_TOKENS)
    num_blocks = max(num_blocks, needed + 3)
    order = torch.randperm(num_blocks - 1)[:needed] + 1
    tables = torch.zeros((1, 4, max(needed, 1) + 2), dtype=torch.int32)
    tables[0, row, :needed] = order
    slot = int(order[-1]) * BLOCK_TOKENS + (length - 1) % BLOCK_TOKENS

    def ints(*values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        input_ids=ints(0),
        positions=ints(position),
        cu_seqlens_q=ints(0, 1),
        seq_lens=ints(length),
        rows=ints(row),
        logits_rows=ints(0),
        slot_mapping=ints(slot, dtype=torch.int64)[None],
        block_tables=tables.to(device),
        query_lens=(1,),
        context_lens=(length,),
        num_tokens=1,
        num_reqs=1,
        max_query_len=1,
        max_seq_len=length,
    ), num_blocks


def make_planes(num_layers, num_blocks, batch, device):
    """Caches whose tokens are random, and NaN where nothing may be read."""
    length = batch.context_lens[0]
    table = batch.block_tables[0, batch.rows[0]].long()
    tokens = torch.arange(length - 1, device=device)
    slots = table[tokens // BLOCK_TOKENS] * BLOCK_TOKENS + tokens % 64
    planes = []
    for _ in range(2 * num_layers):
        shape = (num_blocks, BLOCK_TOKENS, KV_HEADS, HEAD)
        plane = torch.full(shape, float("nan"), dtype=torch.float16, device=device)
        values = torch.randn(length - 1, KV_HEADS, HEAD, device=device)
        plane.flatten(0, 1)[slots] = values.half()
        planes.append(plane)
    return planes[:num_layers], planes[num_layers:], slots


def run_both(model, length, device, *, rounds=True):
    """The largest error of the result and of the keys and values that the op wrote; NaN if one is.

    It wrote nothing else.
    """
    num_layers = len(model.layers)
    batch, num_blocks = make_batch(length, device)
    k, v, slots = make_planes(num_layers, num_blocks, batch, device)
    x = torch.randn(1, HIDDEN, device=device)
    layers = [
        model.dense(i) | {"keys": k[i].flatten(0, 1)[slots], "values": v[i].flatten(0, 1)[slots]}
        for i in range(num_layers)
    ]
    turn = model.weights.rope[int(batch.positions[0])]
    expected, new = oracle.fused_decode_step(x[0], layers, turn, EPS, SCALE, rounds=rounds)
    before = [plane.clone() for plane in (*k, *v)]
    out = fused_decode_step(x, model.weights, prepare_caches(k, v), batch)
    slot = int(batch.slot_mapping[0, 0])
    wanted = torch.stack([pair[i] for i in range(2) for pair in new])
    written = torch.stack([plane.flatten(0, 1)[slot] for plane in (*k, *v)])
    for plane, old in zip((*k, *v), before, strict=True):
        plane.flatten(0, 1)[slot] = old.flatten(0, 1)[slot]
        assert torch.equal(plane.view(torch.int16), old.view(torch.int16))
    errors = relative_error(out[0], expected), relative_error(written, wanted)
    return torch.tensor(errors).max().item()


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


ALL_Q6 = 63
SLICES_INNER = 4096 + 1792  # two slices, the second not full


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("qtype", [QuantType.Q4_K, QuantType.Q6_K], ids=lambda q: q.name)
def test_packing_keeps_every_byte(name, qtype):
    slices = 2 if name == "down" else 1
    rows = ROWS.get(name, 2 * HIDDEN)
    data = torch.randint(0, 256, (rows, qtype.row_bytes(4096 * slices)), dtype=torch.uint8)
    packed = fused_decode_step_stream.pack_matrix(name, data)
    assert packed.numel() == data.numel()
    assert torch.equal(fused_decode_step_stream.unpack_matrix(name, packed), data)


def test_places_cover_the_stream():
    """Every byte of it belongs to one matrix of one layer, in the order of use."""
    masks, slices = (0, V_AND_DOWN, ALL_Q6), 3
    num_bytes, starts = fused_decode_step_stream.stream_layout(masks, slices)
    covered = []
    for layer in range(3):
        places = fused_decode_step_stream.matrix_places(masks, slices, starts, layer)
        covered += [span for name in MATRICES for span in places[name]]
    covered.sort()
    assert covered[0][0] == 0
    assert covered[-1][1] == num_bytes
    assert all(a[1] == b[0] for a, b in pairwise(covered))


@pytest.mark.parametrize("mask", [0, V_AND_DOWN])
def test_cpu_matches_oracle(mask):
    device = torch.device("cpu")
    model = make_model([mask], 1, device, has_qk_norm=bool(mask))
    assert run_both(model, 70, device) < TOLERANCE


@pytest.mark.parametrize("mask", [0, ALL_Q6])
def test_a_slice_that_is_not_full(mask):
    """Llama-3-8B has 3.5 slices; the zeros that fill the last one add nothing."""
    device = torch.device("cpu")
    model = make_model([mask], 2, device, inner=4096 + 1792, has_qk_norm=False)
    assert run_both(model, 70, device) < TOLERANCE


@pytest.mark.gpu
def test_llama_3_on_the_gpu(device):
    model = make_model((V_AND_DOWN, 0), 4, device, inner=14336, has_qk_norm=False)
    assert run_both(model, 100, device) < TOLERANCE * 2


@pytest.mark.gpu
@pytest.mark.parametrize("has_qk_norm", [True, False])
@pytest.mark.parametrize(
    ("masks", "slices"), [((0,), 3), ((V_AND_DOWN, 0, ALL_Q6, 1, 2, 24), 3), ((ALL_Q6, 0), 1)]
)
def test_matches_oracle(masks, slices, has_qk_norm, device):
    model = make_model(masks, slices, device, has_qk_norm=has_qk_norm)
    assert run_both(model, 100, device) < TOLERANCE * len(masks)
    assert run_both(model, 100, device, rounds=False) < 3e-2 * len(masks)


@pytest.fixture(scope="module")
def build_source(tmp_path_factory):
    """Compiles the source for a model on a processor; once for each."""

    @functools.cache
    def build(masks, inner, has_qk_norm):
        slices = -(-inner // 4096)
        model = make_model(masks, slices, CPU, inner=inner, has_qk_norm=has_qk_norm)
        folder = tmp_path_factory.mktemp("step")
        return model, fused_decode_step_on_cpu.build(
            len(masks), slices, folder, has_qk_norm=has_qk_norm
        )

    return build


def run_on_cpu(library, model, length, **options):
    """The result of the source for a token, with new keys and values, and the expected result."""
    num_layers = len(model.layers)
    batch, num_blocks = make_batch(length, CPU)
    planes = make_planes(num_layers, num_blocks, batch, CPU)[:2]
    x, copies = torch.randn(1, HIDDEN), [[plane.clone() for plane in side] for side in planes]
    out = fused_decode_step_on_cpu.run(library, x, model.weights, *copies, batch, **options)
    expected = fused_decode_step(x, model.weights, prepare_caches(*planes), batch)
    slot = int(batch.slot_mapping[0, 0])
    pairs = [pair for side in zip(copies, planes, strict=True) for pair in zip(*side, strict=True)]
    for copy, plane in pairs:
        others = torch.arange(plane.flatten(0, 1).shape[0]) != slot
        rest = [side.flatten(0, 1)[others].view(torch.int16) for side in (copy, plane)]
        assert torch.equal(*rest)  # no other token was written
    return [
        [result[0], *(plane.flatten(0, 1)[slot].flatten() for side in sides for plane in side)]
        for result, sides in ((out, copies), (expected, planes))
    ]


@pytest.mark.parametrize(
    ("masks", "inner", "has_qk_norm", "length"),
    [
        # Tiles of keys for all groups of warps.
        pytest.param((V_AND_DOWN, ALL_Q6 - V_AND_DOWN), 4096, True, 2100, id="layers"),
        # No key but the new one.
        pytest.param((0,), SLICES_INNER, False, 1, id="slices"),
    ],
)
def test_source_matches_op(masks, inner, has_qk_norm, length, build_source):
    """Each matrix of either type; keys and values of each layer."""
    model, library = build_source(masks, inner, has_qk_norm)
    for result, expected in zip(*run_on_cpu(library, model, length), strict=True):
        assert relative_error(result, expected.double()) < TOLERANCE * len(masks)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 70, 2500])
def test_source_in_any_order_of_warps(build_source, length):
    """No index, wait or reuse of shared memory depends on who comes first: bit by bit."""
    model, library = build_source((V_AND_DOWN,), 4096, True)
    results = []
    for seed in range(2):
        torch.manual_seed(0)
        found, wanted = run_on_cpu(library, model, length, seed=seed)
        for result, expected in zip(found, wanted, strict=True):
            assert relative_error(result, expected.double()) < TOLERANCE
        results.append(torch.cat(found))
    assert torch.equal(*results)


def test_source_ends_without_its_neighbours(build_source):
    """CTAs that wait in vain for other CTAs end after a while, with NaN."""
    model, library = build_source((0,), SLICES_INNER, False)
    (result, *_), _ = run_on_cpu(library, model, 70, late=120)
    assert result[: 120 * 32].isnan().all()


# A new token alone, borders of a warp's keys, of a tile, of a block, of all CTAs' first and second
# tiles, of the groups; long.
LENGTHS = (1, 2, 8, 9, 10, 32, 33, 34, 64, 65, 66, 512, 513, 514, 600, 2048, 2049, 2500, 9000)


@pytest.mark.gpu
def test_every_depth(device):
    model = make_model((0, V_AND_DOWN), 1, device)
    for length in LENGTHS:
        assert run_both(model, length, device) < 2 * TOLERANCE, length


@pytest.mark.gpu
def test_scratch_writes_nothing(device):
    model = make_model((0,), 1, device)
    batch, num_blocks = make_batch(1, device)
    k, v, _ = make_planes(1, num_blocks, batch, device)
    batch = replace(batch, slot_mapping=torch.full_like(batch.slot_mapping, -1))
    caches, x = prepare_caches(k, v), torch.randn(1, HIDDEN, device=device)
    out = fused_decode_step(x, model.weights, caches, batch)
    assert out.isfinite().all()
    assert k[0].isnan().all()
    assert v[0].isnan().all()


@pytest.mark.gpu
def test_replays_have_the_bits_of_a_launch(device):
    """One graph serves all lengths; 64 steps that feed each other."""
    model = make_model((V_AND_DOWN, 0, 0), 3, device)
    num_blocks = 20
    batch, _ = make_batch(1000, device, num_blocks=num_blocks)
    k, v, _ = make_planes(3, num_blocks, batch, device)
    for plane in (*k, *v):
        plane.nan_to_num_(0.5)
    caches, start = prepare_caches(k, v), torch.randn(1, HIDDEN, device=device)

    def steps(run):
        planes = [plane.clone() for plane in (*k, *v)]
        results, y = [], start.clone()
        for i in range(64):
            batch.seq_lens.fill_(900 + i)
            batch.positions.fill_(i % POSITIONS)
            place = 900 + i - 1
            block = batch.block_tables[0, 2, place // 64].long()
            batch.slot_mapping.copy_((block * 64 + place % 64).view(1, 1))
            y = run(y / y.std()).clone()
            results.append(y)
        for plane, old in zip((*k, *v), planes, strict=True):
            plane.copy_(old)
        return torch.cat(results)

    direct = steps(lambda y: fused_decode_step(y, model.weights, caches, batch))
    x = start.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_decode_step(x, model.weights, caches, batch)

    def replay(y):
        x.copy_(y)
        graph.replay()
        return out

    replayed = steps(replay)
    assert replayed.isfinite().all()
    assert torch.equal(direct, replayed)


def test_wrong_arguments(device):
    builder = FusedDecodeStepBuilder((0,), 1, torch.device("meta"))
    wrong = QuantTensor(QuantType.Q6_K, Layout.FILE, (4096, 4096), {})
    with pytest.raises(ArgumentError, match="q of layer 0 is Q6_K"):
        builder.add(0, dict.fromkeys(MATRICES, (wrong,)))
    plane = torch.zeros((3, 64, KV_HEADS, HEAD), device=device)
    with pytest.raises(ArgumentError, match="a cache is"):
        prepare_caches([plane], [plane])
