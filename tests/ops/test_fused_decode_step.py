"""A whole decode step in one launch: against the oracle, at every depth, with the same bits."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests import fused_decode_step_on_cpu
from tests.fused_decode_step_model import (
    EPS,
    POSITIONS,
    SCALE,
    V_AND_DOWN,
    columns_of,
    make_model,
    make_shape,
    rows_of,
)
from tiercel.batch import Batch
from tiercel.errors import ArgumentError
from tiercel.kernels.fused.fused_decode_step_geometry import (
    BLOCK_TOKENS,
    MATRICES,
    TYPES,
    make_geometry,
    make_mask,
)
from tiercel.kernels.fused.fused_decode_step_stream import StreamLayout
from tiercel.ops.fused_decode_step import (
    FusedDecodeStepBuilder,
    StepStream,
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
ALL_Q6 = 63
ALL_Q5 = ALL_Q6 << 6
Q5_K_M = V_AND_DOWN | (ALL_Q6 - V_AND_DOWN) << 6  # of half of such a file's layers
# Of q, k, v, o, gate and up, down: each type of blocks of 32, once as the first of its phase.
SMALL_BLOCKS = (
    make_mask(("Q4_0", "Q8_0", "Q5_0", "IQ4_XS", "IQ4_NL", "Q8_0")),
    make_mask(("Q8_0", "IQ4_NL", "Q4_0", "Q5_0", "Q8_0", "Q4_0")),
)
ALL_Q8 = make_mask(("Q8_0",) * 6)
IQ4_M = make_mask(("IQ4_XS", "IQ4_XS", "Q5_K", "Q6_K", "IQ4_XS", "Q5_K"))
# Each way of sharing rows, with few of them: what published sizes have, and heads of 64, several
# query heads, biases, CTAs with more and with fewer groups.
SHAPES = {
    "whole": make_shape(inner=8192),  # as Qwen3-8B: a warp has a whole row
    "rows": make_shape(hidden=1024, inner=768, heads=16),  # a warp has four rows; 8 CTAs o and down
    "slices": make_shape(hidden=2304, inner=1280, heads=16),  # two warps a row: 5 and 4 blocks
    # Four warps a row; 8 CTAs have two groups of o and down, whose slices follow each other.
    "wide": make_shape(hidden=4352, inner=4352, heads=40),
    "widest": make_shape(hidden=8192, inner=4352, heads=64),  # eight heads share one
    "llama": make_shape(hidden=2048, inner=2048, head_dim=64),
    "qwen2": make_shape(hidden=3584, inner=2560, heads=28, kv_heads=4),  # seven heads, 32 splits
    "heads": make_shape(hidden=512, inner=768, heads=40, kv_heads=40, head_dim=64),  # 3 splits
    "lanes": make_shape(hidden=640, inner=1152, heads=4, kv_heads=2, head_dim=64),  # odd numbers
    # Heads of 256 in two slots of a tile, norms of updates, GELU, a window of some tiles.
    "gemma": make_shape(hidden=640, inner=768, heads=4, kv_heads=1, head_dim=256, window=300),
    # As the largest: two groups of outputs in some CTAs; heads of 128; a window of few keys.
    "gemmas": make_shape(hidden=4352, inner=1280, heads=4, kv_heads=2, window=40),
    # 12 query heads share one: two groups of six.
    "teams": make_shape(hidden=512, inner=768, heads=24, kv_heads=2),
    "tiny": make_shape(hidden=512, inner=768, heads=8, kv_heads=2, head_dim=64),
}
ODD = ("lanes", "gemma")  # no multiples of 256: types of blocks of 32 alone
HAS_BIAS = ("qwen2", "tiny")
HAS_QK_NORM = ("whole", "rows", "slices", "wide", "gemma", "gemmas")


def make_sized(name, masks, device="cpu", most_tokens=1):
    """A model of one of SHAPES."""
    return make_model(
        masks,
        SHAPES[name],
        device,
        has_qk_norm=name in HAS_QK_NORM,
        has_bias=name in HAS_BIAS,
        most_tokens=most_tokens,
    )


def make_batch(length, device, *, num_blocks=0, row=2, position=5):
    """One request in row 2 of 4 whose blocks are in any order; its last token is new."""
    needed = -(-length // BLOCK_TOKENS)
    num_blocks = max(num_blocks, needed + 3)
    # Of full layers and of sliding ones.
    orders = [torch.randperm(num_blocks - 1)[:needed] + 1 for _ in range(2)]
    tables = torch.zeros((2, 4, max(needed, 1) + 2), dtype=torch.int32)
    for group, order in enumerate(orders):
        tables[group, row, :needed] = order
    slots = [[int(order[-1]) * BLOCK_TOKENS + (length - 1) % BLOCK_TOKENS] for order in orders]

    def ints(*values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        input_ids=ints(0),
        positions=ints(position),
        cu_seqlens_q=ints(0, 1),
        seq_lens=ints(length),
        rows=ints(row),
        logits_rows=ints(0),
        slot_mapping=torch.tensor(slots, device=device),
        block_tables=tables.to(device),
        query_lens=(1,),
        context_lens=(length,),
        num_tokens=1,
        num_reqs=1,
        max_query_len=1,
        max_seq_len=length,
    ), num_blocks


def layer_slots(model, batch):
    """Of each layer, the slots of the tokens that it sees before the new one, and that one's."""
    shape, length = model.weights.geometry.shape, batch.context_lens[0]
    found = []
    for slides in shape.sliding or (False,) * len(model.layers):
        table = batch.block_tables[int(slides), batch.rows[0]].long()
        first = max(0, length - shape.window) if slides else 0
        tokens = torch.arange(first, length, device=table.device)
        found.append(table[tokens // BLOCK_TOKENS] * BLOCK_TOKENS + tokens % BLOCK_TOKENS)
    return [(slots[:-1], int(slots[-1])) for slots in found]


def make_planes(model, num_blocks, batch, device):
    """Caches whose tokens are random, and NaN where nothing may be read."""
    shape = model.weights.geometry.shape
    sides = []
    for _ in range(2):
        planes = []
        for slots, _ in layer_slots(model, batch):
            size = (num_blocks, BLOCK_TOKENS, shape.num_kv_heads, shape.head_dim)
            plane = torch.full(size, float("nan"), dtype=torch.float16, device=device)
            values = torch.randn(len(slots), shape.num_kv_heads, shape.head_dim, device=device)
            plane.flatten(0, 1)[slots] = values.half()
            planes.append(plane)
        sides.append(planes)
    return sides


def step(x, model, k, v, batch):
    """The op; sliding layers have the second group."""
    caches = prepare_caches(model.weights.geometry, k, v)
    return fused_decode_step(x, model.weights, caches, batch, (0, 1))


def run_both(model, length, device, *, rounds=True):
    """The largest error of the result and of the keys and values that the op wrote; NaN if one is.

    It wrote nothing else.
    """
    num_layers = len(model.layers)
    batch, num_blocks = make_batch(length, device)
    k, v = make_planes(model, num_blocks, batch, device)
    shape = model.weights.geometry.shape
    x = torch.randn(1, shape.hidden_size, device=device)
    seen = layer_slots(model, batch)
    turns = [rope[int(batch.positions[0])] for rope in model.weights.ropes]
    sliding = shape.sliding or (False,) * num_layers
    layers = [
        model.dense(i)
        | {"keys": k[i].flatten(0, 1)[slots], "values": v[i].flatten(0, 1)[slots]}
        | {"turn": turns[int(sliding[i])]}
        for i, (slots, _) in enumerate(seen)
    ]
    expected, new = oracle.fused_decode_step(
        x[0], layers, turns[0], EPS, SCALE, activation=shape.activation, rounds=rounds
    )
    before = [plane.clone() for plane in (*k, *v)]
    out = step(x, model, k, v, batch)
    own_slots = [slot for _, slot in seen] * 2
    wanted = torch.stack([pair[i] for i in range(2) for pair in new])
    written = torch.stack(
        [plane.flatten(0, 1)[slot] for plane, slot in zip((*k, *v), own_slots, strict=True)]
    )
    for plane, old, slot in zip((*k, *v), before, own_slots, strict=True):
        plane.flatten(0, 1)[slot] = old.flatten(0, 1)[slot]
        assert torch.equal(plane.view(torch.int16), old.view(torch.int16))
    errors = relative_error(out[0], expected), relative_error(written, wanted)
    return torch.tensor(errors).max().item()


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


BIG = ("whole", "wide", "widest", "llama", "qwen2", "gemma", "gemmas", "teams")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in BIG)) for name in SHAPES]
)
def test_packing_keeps_every_byte(name):
    """Every byte of the stream but what fills lines belongs to one matrix."""
    small_blocks = ("Q4_0", "Q8_0", "Q5_0", "IQ4_NL")
    of_shape = dict.fromkeys(("lanes", "gemma"), small_blocks) | {"tiny": TYPES}
    kinds = of_shape.get(name, ("Q4_K", "Q6_K", "Q5_K"))
    types = [QuantType[kind] for kind in kinds]
    shape = replace(SHAPES[name], num_layers=len(types))
    # No nibble is 0: some change places.
    masks = [make_mask([kind.name] * len(MATRICES)) for kind in types]
    stream = StepStream(make_geometry(shape, masks), CPU)
    rows, columns, written = rows_of(shape), columns_of(shape), 0
    matrices = {}
    for layer, qtype in enumerate(types):
        for matrix in MATRICES:
            count = rows[matrix] * (2 if matrix == "gate_up" else 1)
            data = torch.randint(
                1, 256, (count, qtype.row_bytes(columns[matrix])), dtype=torch.uint8
            )
            data |= 0x11
            if qtype is QuantType.Q5_0:  # whose bits change bytes
                data.unflatten(1, (-1, 22))[..., 2:6] = 255
            stream.write(layer, matrix, data)
            matrices[layer, matrix] = data
            written += data.numel()
    for (layer, matrix), data in matrices.items():
        assert torch.equal(stream.read(layer, matrix), data)
    assert (stream.data != 0).sum() == written


def test_sequences_follow_each_other():
    """Each group of warps of each CTA has its own, from end to end."""
    layout = StreamLayout(make_geometry(replace(SHAPES["wide"], num_layers=3), (0, ALL_Q6, 0)))
    starts = layout.starts.flatten()
    assert starts[0] == 0
    assert (starts[1:] >= starts[:-1]).all()
    places = [layout.place(i, name).flatten() for i in range(3) for name in MATRICES]
    assert torch.equal(places[0], starts)
    assert all((after >= before).all() for before, after in pairwise(places))
    assert (places[-1][:-1] <= starts[1:]).all()


@pytest.mark.parametrize(
    ("name", "mask"), [("tiny", 0), ("rows", V_AND_DOWN), ("tiny", ALL_Q5), ("llama", ALL_Q6)]
)
def test_cpu_matches_oracle(name, mask):
    assert run_both(make_sized(name, (mask,)), 70, CPU) < TOLERANCE


def test_cpu_matches_oracle_with_two_kinds_of_layers():
    assert run_both(make_sized("gemma", SMALL_BLOCKS), 400, CPU) < 2 * TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_matches_oracle_at_every_size(name, device):
    masks = (V_AND_DOWN, 0, ALL_Q6, 1, 2, 24, ALL_Q5, Q5_K_M, IQ4_M, ALL_Q8)
    masks = SMALL_BLOCKS * 3 if name in ODD else masks
    model = make_sized(name, masks, device)
    assert run_both(model, 100, device) < TOLERANCE * len(masks)
    assert run_both(model, 100, device, rounds=False) < 3e-2 * len(masks)


@pytest.fixture(scope="module")
def build_source(tmp_path_factory):
    """Compiles the source for a model on a processor; once for each."""

    @functools.cache
    def build(name, masks):
        model = make_sized(name, masks)
        folder = tmp_path_factory.mktemp("step")
        return model, fused_decode_step_on_cpu.build(
            model.weights.geometry,
            folder,
            has_qk_norm=model.weights.head_norms is not None,
            has_bias=model.weights.bias is not None,
        )

    return build


def run_on_cpu(library, model, length, **options):
    """The result of the source for a token, with new keys and values, and the expected result."""
    weights = model.weights
    batch, num_blocks = make_batch(length, CPU)
    planes = make_planes(model, num_blocks, batch, CPU)
    x = torch.randn(1, weights.geometry.shape.hidden_size)
    copies = [[plane.clone() for plane in side] for side in planes]
    out = fused_decode_step_on_cpu.run(library, x, weights, *copies, batch, **options)
    expected = step(x, model, *planes, batch)
    slots = [slot for _, slot in layer_slots(model, batch)] * 2
    results = [[out[0]], [expected[0]]]
    for copy, plane, slot in zip(*([*k, *v] for k, v in (copies, planes)), slots, strict=True):
        others = torch.arange(plane.flatten(0, 1).shape[0]) != slot
        rest = [side.flatten(0, 1)[others].view(torch.int16) for side in (copy, plane)]
        assert torch.equal(*rest)  # no other token was written
        for result, side in zip(results, (copy, plane), strict=True):
            result.append(side.flatten(0, 1)[slot].flatten())
    return results


def check_source(build_source, name, masks, length):
    """Each matrix of either type; keys and values of each layer."""
    model, library = build_source(name, masks)
    results = list(zip(*run_on_cpu(library, model, length), strict=True))
    for result, expected in results:
        assert relative_error(result, expected.double()) < TOLERANCE * len(masks)
    # Both rounded the same inputs to the first layer's keys and values: what differs is float16.
    for result, expected in (results[1], results[1 + len(masks)]):
        assert relative_error(result, expected.double()) < TOLERANCE / 10


@pytest.mark.parametrize(
    ("name", "masks", "length"),
    [
        # Tiles of keys for all groups of warps.
        pytest.param("rows", (V_AND_DOWN, ALL_Q6 - V_AND_DOWN), 2100, id="layers"),
        # No key but the new one.
        pytest.param("whole", (0,), 1, id="slices"),
        pytest.param("tiny", (0, ALL_Q6), 70, id="tiny", marks=pytest.mark.slow),
        pytest.param("qwen2", (V_AND_DOWN,), 300, id="qwen2"),
        pytest.param("slices", (Q5_K_M, ALL_Q5), 70, id="five_bits"),
        pytest.param("heads", (0,), 600, id="heads", marks=pytest.mark.slow),
        pytest.param("lanes", SMALL_BLOCKS, 70, id="lanes"),
        pytest.param("rows", (IQ4_M,), 70, id="four_bits"),
        pytest.param("gemma", (SMALL_BLOCKS[0], SMALL_BLOCKS[1]), 500, id="gemma"),
        pytest.param("teams", (0,), 70, id="teams"),
        pytest.param("gemmas", (V_AND_DOWN, 0), 300, id="gemmas", marks=pytest.mark.slow),
    ],
)
def test_source_matches_op(name, masks, length, build_source):
    check_source(build_source, name, masks, length)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ODD])
@pytest.mark.parametrize("masks", [(0,), (ALL_Q6, V_AND_DOWN), (ALL_Q5,), (IQ4_M, ALL_Q8)], ids=str)
def test_source_matches_op_at_every_size(name, masks, build_source):
    check_source(build_source, name, masks, 600)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows", "wide", "gemmas"])
@pytest.mark.parametrize("length", [1, 70, 2500])
def test_source_in_any_order_of_warps(build_source, length, name):
    """No index, wait or reuse of shared memory depends on who comes first: bit by bit."""
    model, library = build_source(name, (V_AND_DOWN,))
    results = []
    for seed in range(2):
        torch.manual_seed(0)
        found, wanted = run_on_cpu(library, model, length, seed=seed)
        for result, expected in zip(found, wanted, strict=True):
            assert relative_error(result, expected.double()) < TOLERANCE
        results.append(torch.cat(found))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("name", "masks", "length", "late"),
    [
        pytest.param("whole", (0,), 70, 120, id="whole", marks=pytest.mark.slow),
        pytest.param("tiny", (0, ALL_Q6), 70, 120, id="tiny", marks=pytest.mark.slow),
        # One of those that own outputs.
        pytest.param("gemma", SMALL_BLOCKS, 500, 19, id="gemma"),
    ],
)
def test_source_ends_without_its_neighbours(build_source, name, masks, length, late):
    """CTAs that wait in vain for other CTAs end after a while, with NaN."""
    model, library = build_source(name, masks)
    (result, *_), _ = run_on_cpu(library, model, length, late=late)
    assert result[: late * 32].isnan().all()


# A new token alone, borders of a warp's keys, of a tile, of a block, of all CTAs' first and second
# tiles, of the groups; long.
LENGTHS = (1, 2, 8, 9, 10, 32, 33, 34, 64, 65, 66, 512, 513, 514, 600, 2048, 2049, 2500, 9000)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "masks"),
    [("whole", (0, V_AND_DOWN)), ("gemma", SMALL_BLOCKS), ("gemmas", (0, ALL_Q8))],
)
def test_every_depth(name, masks, device):
    model = make_sized(name, masks, device)
    for length in LENGTHS:
        assert run_both(model, length, device) < 2 * TOLERANCE, length


@pytest.mark.gpu
def test_scratch_writes_nothing(device):
    model = make_model((0,), device=device)
    batch, num_blocks = make_batch(1, device)
    k, v = make_planes(model, num_blocks, batch, device)
    batch = replace(batch, slot_mapping=torch.full_like(batch.slot_mapping, -1))
    caches = prepare_caches(model.weights.geometry, k, v)
    x = torch.randn(1, 4096, device=device)
    out = fused_decode_step(x, model.weights, caches, batch)
    assert out.isfinite().all()
    assert k[0].isnan().all()
    assert v[0].isnan().all()


@pytest.mark.gpu
def test_replays_have_the_bits_of_a_launch(device):
    """One graph serves all lengths; 64 steps that feed each other."""
    model = make_sized("wide", (V_AND_DOWN, 0, 0), device)
    num_blocks = 20
    batch, _ = make_batch(1000, device, num_blocks=num_blocks)
    k, v = make_planes(model, num_blocks, batch, device)
    for plane in (*k, *v):
        plane.nan_to_num_(0.5)
    caches = prepare_caches(model.weights.geometry, k, v)
    start = torch.randn(1, 4352, device=device)

    def steps(run):
        planes = [plane.clone() for plane in (*k, *v)]
        results, y = [], start.clone()
        for i in range(64):
            batch.seq_lens.fill_(900 + i)
            batch.positions.fill_(i % POSITIONS)
            place = 900 + i - 1
            block = batch.block_tables[0, 2, place // 64].long()
            batch.slot_mapping.copy_((block * 64 + place % 64).view(1, 1).expand(2, 1))
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
    geometry = make_geometry(make_shape(), (0,))
    builder = FusedDecodeStepBuilder(geometry, CPU)
    wrong = QuantTensor(QuantType.Q6_K, Layout.FILE, (4096, 4096), {})
    with pytest.raises(ArgumentError, match="q of layer 0 is Q6_K"):
        builder.add(0, dict.fromkeys(MATRICES, (wrong,)))
    plane = torch.zeros((3, 64, 8, 128), device=device)
    with pytest.raises(ArgumentError, match="a cache is"):
        prepare_caches(geometry, [plane], [plane])
