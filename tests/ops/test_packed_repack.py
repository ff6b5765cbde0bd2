"""Planes of quantised weights: every byte at its place, and back again."""

import numpy as np
import pytest
import torch

from tiercel.errors import ArgumentError
from tiercel.kernels.packed import packed_repack as kernel
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant import QuantTensor
from tiercel.quant_types import PLANES, TILE_ROWS, Layout, QuantType
from tiercel.reference import packed_repack as oracle

TYPES = list(PLANES)
# (rows, blocks): less than a tile, one tile, one row more and less, several.
# Blocks of 32 weights go in fours.
SHAPES = [(1, 1), (15, 3), (16, 2), (17, 1), (37, 5), (18, 8)]


def make_weight(qtype, rows, blocks, device="cpu"):
    """Random bytes, rows strided as in a cut of a wider matrix."""
    wide = torch.randint(0, 256, (rows, (blocks + 1) * qtype.block_bytes), dtype=torch.uint8)
    data = wide.to(device)[:, : blocks * qtype.block_bytes]
    return QuantTensor(qtype, Layout.FILE, (rows, blocks * qtype.block_weights), {"data": data})


@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_planes_match_oracle(rows, blocks, qtype, device):
    weight = make_weight(qtype, rows, blocks, device)
    packed = packed_repack(weight, Layout.SOA)
    data = weight.planes["data"].cpu().numpy().reshape(rows, blocks, qtype.block_bytes)
    expected = oracle.packed_repack(data, qtype)
    assert list(packed.planes) == list(expected)
    for name, plane in packed.planes.items():
        assert plane.is_contiguous()
        np.testing.assert_array_equal(plane.cpu().numpy(), expected[name])


@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
@pytest.mark.parametrize(("rows", "blocks"), [*SHAPES, (0, 2), (3, 0)])
def test_round_trip(rows, blocks, qtype, device):
    weight = make_weight(qtype, rows, blocks, device)
    packed = packed_repack(weight, Layout.SOA)
    assert packed.layout is Layout.SOA
    assert packed.shape == weight.shape
    whole = -(-blocks // qtype.group_blocks) * qtype.group_blocks
    assert packed.nbytes == -(-rows // 16) * 16 * whole * qtype.block_bytes
    back = packed_repack(packed, Layout.FILE)
    assert back.layout is Layout.FILE
    assert torch.equal(back.planes["data"], weight.planes["data"])


@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_planes_hold_each_byte_once(qtype):
    """The fields cover the block, and the bytes of a tile its plane, without overlap."""
    fields = [i for plane in PLANES[qtype] for i in range(plane.start, plane.start + plane.size)]
    assert sorted(fields) == list(range(qtype.block_bytes))
    group = qtype.group_blocks
    for plane in PLANES[qtype]:
        size = group * plane.size
        places = {oracle.place(plane, group, row, i) for row in range(16) for i in range(size)}
        assert places == set(range(16 * size))


def test_groups_are_128_or_256_weights():
    """Those of a row that a tensor core takes together; the last is filled up."""
    for qtype in TYPES:
        group = 128 if qtype.block_weights == 32 else 256
        assert qtype.block_weights * qtype.group_blocks == group
        for columns in (qtype.block_weights, group, group + qtype.block_weights, 5 * group):
            assert qtype.num_groups(columns) == -(-columns // group)


def test_tiles_have_one_size():
    assert kernel.TILE_ROWS == TILE_ROWS


def test_lanes_read_512_bytes_in_turn():
    """Piece j of lane 4 * row + t: the layout that kernels/cuda/packed/packed_units.cuh loads."""
    low = PLANES[QuantType.Q4_K][0]
    for row in range(16):
        for t in range(4):
            for j in range(2):
                at = oracle.place(low, 1, row, 32 * t + 16 * j)
                assert at == 1024 * (row // 8) + 512 * j + 16 * (4 * (row % 8) + t)
    low, high = PLANES[QuantType.Q6_K][:2]
    for row in range(16):
        for t in range(4):
            lane = 16 * (4 * (row % 8) + t)
            for j in range(2):
                at = oracle.place(low, 1, row, 64 * (t // 2) + 32 * j + 16 * (t % 2))
                assert at == 1024 * (row // 8) + 512 * j + lane
            assert oracle.place(high, 1, row, 16 * t) == 512 * (row // 8) + lane


@pytest.mark.parametrize("qtype", [QuantType.Q4_0, QuantType.Q5_1, QuantType.IQ4_NL], ids=str)
def test_four_lanes_share_each_block_of_32(qtype):
    """Lane 4 * row + t holds bytes 4 t .. 4 t + 3 of four blocks: see packed_units32.cuh."""
    low = PLANES[qtype][0]
    for row in range(16):
        for block in range(4):
            for t in range(4):
                at = oracle.place(low, 4, row, 16 * block + 4 * t)
                assert at == 512 * (row // 8) + 16 * (4 * (row % 8) + t) + 4 * block


def test_same_layout_is_returned_as_it_is():
    weight = make_weight(QuantType.Q4_K, 3, 2)
    assert packed_repack(weight, Layout.FILE) is weight
    packed = packed_repack(weight, Layout.SOA)
    assert packed_repack(packed, Layout.SOA) is packed


def test_wrong_arguments():
    data = torch.zeros(2, 34, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="F16 from FILE to SOA"):
        packed_repack(QuantTensor(QuantType.F16, Layout.FILE, (2, 17), {"data": data}), Layout.SOA)
    with pytest.raises(ArgumentError, match="Q4_K from FILE to BLOCKS"):
        packed_repack(make_weight(QuantType.Q4_K, 3, 2), Layout.BLOCKS)
    for shape, plane in (((2, 256), data), ((2, 250), data), ((2, 256), data.int())):
        weight = QuantTensor(QuantType.Q4_K, Layout.FILE, shape, {"data": plane})
        with pytest.raises(ArgumentError, match="do not hold Q4_K"):
            packed_repack(weight, Layout.SOA)
    packed = packed_repack(make_weight(QuantType.Q6_K, 3, 2), Layout.SOA)
    short = QuantTensor(packed.qtype, packed.layout, (17, 512), packed.planes)
    with pytest.raises(ArgumentError, match="do not hold Q6_K"):
        packed_repack(short, Layout.FILE)


def test_packed_tensors_are_not_cut():
    packed = packed_repack(make_weight(QuantType.Q4_K, 16, 2), Layout.SOA)
    for cut in (
        lambda: packed.rows(0, 1),
        lambda: packed.cols(0, 256),
        lambda: packed.take(torch.tensor([0])),
    ):
        with pytest.raises(ArgumentError, match="layout SOA cannot be cut"):
            cut()
