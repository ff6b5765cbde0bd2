"""Up to 8 tokens times matrices of several formats that read the same x, in one launch.

cuda/block/linear_group.cu multiplies tiles of 16 rows on tensor cores, from E4M3 with scales of
blocks, Q8_0 in planes, or bfloat16. What is around the products of a DeepSeek-V4 layer is part of
the launch: the norm or the inverse rotation of x, the clamped SwiGLU of gate and up, a sum that the
result is added to.

Floor: the planes once, x once for each CTA from L2, the results once. So a CTA whose x leaves no
room for a second one on its multiprocessor has twice as many warps. 16 tokens are slower than one
matrix after the other (wo_a 24.2 against 15.3 us), and requests of all weights before the wait cost
1 to 4 us a launch (H200, printed; docs/notes/block_products.md).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.kernels.runtime import rtc

MAX_TOKENS = 8  # of a tensor core product's columns
MAX_MATRICES = 8  # MOST_MATRICES of the kernel
CAPABILITY = (8, 0)  # products of bfloat16
TILE_ROWS, PAIR_ROWS = 16, 8
UNIT_BYTES = 128  # of a row
KINDS = ("FP8_BLOCK", "BF16", "Q8_0")  # numbers and bits of the kernel
PLAIN, NORMED, ROTATED = 0, 1, 2  # INPUT of the kernel
_WARPS, _MOST_WARPS = 8, 16  # of a CTA
GROUP_ROWS = TILE_ROWS * _WARPS  # groups are multiples of them: those of a CTA at a time
_SUM_BYTES = 2 * 512  # of a warp's sums, in two buffers
_RESERVED_BYTES = 1 << 10  # of shared memory, by the system for each CTA
_SM_BYTES, CTA_BYTES = 228 << 10, 227 << 10
_X_BYTES = 128 << 10  # of shared memory, at most, for x and sums of three CTAs
H200_SMS = 132
HALF_X = False  # whether E4M3 is multiplied in float16, where an instruction widens it
HALF_CAPABILITY = (8, 9)


class LinearGroupConfig(NamedTuple):
    """A launch.

    Attributes:
        parts: warps that share a tile's columns; decides the order of sums.
        tiles: of a CTA at a time.
        stages: units of a warp in flight.
        ctas: on a multiprocessor, for the registers.
    """

    parts: int
    tiles: int
    stages: int
    ctas: int


def parts_of(columns: int) -> int:
    """Warps that share a tile, by the columns alone: each has two units or more."""
    units = columns // UNIT_BYTES
    return next(parts for parts in (8, 4, 2, 1) if parts == 1 or units >= 2 * parts)


def select_linear_group(
    columns: int,
    num_tiles: Sequence[int],
    num_tokens: int,
    *,
    kind_of_input: int = PLAIN,
    has_q8: bool = False,
    num_sms: int = H200_SMS,
) -> LinearGroupConfig:
    """Choose the launch; the order of sums follows from the columns alone.

    Two CTAs of 8 warps a multiprocessor; with four units a warp where they hold all blocks. Three
    where they do and two do not (router, shared w1 and w3: 8.8 us, 11.8 with two), unless their x
    leaves loads no cache: the x of CSA took 20.2 us with three for 8 tokens, 11.5 with two (H200,
    results/linear_group_h200.json). Q8_0 and norms would spill at the 80 registers of three. One of
    16 warps where x has no room for two: wo_b of 8 tokens takes 16.0 us, 21.1 with 8 warps.

    Args:
        columns: of the matrices.
        num_tiles: of each matrix.
        num_tokens: rows of x.
        kind_of_input: INPUT of the kernel.
        has_q8: whether one of them is in Q8_0.
        num_sms: multiprocessors of the device.
    """
    parts = parts_of(columns)
    tiles = _WARPS // parts
    blocks = sum(-(-count // tiles) for count in num_tiles)
    two = LinearGroupConfig(parts, tiles, 2, 2)
    if parts > 1 and 2 * (smem_bytes(columns, num_tokens, two) + _RESERVED_BYTES) > _SM_BYTES:
        return LinearGroupConfig(parts, _MOST_WARPS // parts, 2, 1)
    three = two._replace(ctas=3)
    has_cache = 3 * smem_bytes(columns, num_tokens, three) <= _X_BYTES
    if has_q8 or blocks > 3 * num_sms:
        return two
    if blocks <= 2 * num_sms:
        return LinearGroupConfig(parts, tiles, 4, 2)
    return three if has_cache and kind_of_input == PLAIN else three._replace(ctas=2)


def unit_columns(dtype: torch.dtype) -> int:
    """Columns of a unit of weights."""
    return UNIT_BYTES // dtype.itemsize


class GroupPlanes(Struct, frozen=True):
    """A matrix as the kernel reads it, and where its results go.

    Attributes:
        weights: (rows, columns) float8_e4m3fn, bfloat16 or int8; rows a multiple of 16 bytes apart.
        out: (tokens, rows), of a pair half as many rows; bfloat16 or float32; rows may be strided.
        scales: of E4M3 (row blocks, column blocks) uint8 E8M0 or float32; of Q8_0 (rows, columns /
            32) float16; contiguous columns.
        block: rows and columns of a scale of E4M3; columns are a multiple of 128.
        num_groups: groups of rows with columns of x of their own, each a multiple of 16 rows.
        is_pair: the rows of gate, then those of up: the result is the clamped SwiGLU.
        addend: (tokens, rows) float32 that the product is added to; rows may be strided.
    """

    weights: Tensor
    out: Tensor
    scales: Tensor | None = None
    block: tuple[int, int] = (1, 1)
    num_groups: int = 1
    is_pair: bool = False
    addend: Tensor | None = None

    @property
    def kind(self) -> int:
        """Place in `KINDS`."""
        dtypes = (torch.float8_e4m3fn, torch.bfloat16, torch.int8)
        return dtypes.index(self.weights.dtype)

    @property
    def num_tiles(self) -> int:
        """Tiles of 16 rows, or of 8 pairs."""
        rows = PAIR_ROWS if self.is_pair else TILE_ROWS
        return -(-self.out.shape[1] // rows)


class GroupInput(NamedTuple):
    """What happens to x: at most one of norm and rotation.

    Attributes:
        norm: weight (columns,) float32 and eps.
        rotation: positions (tokens,) int32 or int64 and table (positions, 2, half) float32; the
            last 2 * half channels of each head are turned by the negative angle.
        head_dim: channels of a head.
        limit: of the clamped SwiGLU; None for no clamp.
    """

    norm: tuple[Tensor, float] | None = None
    rotation: tuple[Tensor, Tensor] | None = None
    head_dim: int = 1
    limit: float | None = None

    @property
    def kind(self) -> int:
        """INPUT of the kernel, without groups of rows."""
        if self.norm is not None:
            return NORMED
        return PLAIN if self.rotation is None else ROTATED

    def kind_for(self, matrices: Sequence[GroupPlanes]) -> int:
        """INPUT of the kernel: groups are what rotated heads have, rotated or not."""
        return ROTATED if any(one.num_groups > 1 for one in matrices) else self.kind


_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int


class _Matrix(ctypes.Structure):
    """`Matrix` of the kernel."""

    _fields_ = (
        *((name, _POINTER) for name in ("weights", "scales", "out", "addend")),
        ("row_bytes", _LONG),
        *((name, _INT) for name in ("kind", "rows", "first_cta", "num_ctas", "num_blocks")),
        ("group_rows", _INT),
        *((name, _INT) for name in ("scale_stride", "scale_rows", "scale_columns")),
        *((name, _INT) for name in ("is_wide_scale", "out_stride", "is_float_out")),
        *((name, _INT) for name in ("addend_stride", "is_pair")),
    )


class _Group(ctypes.Structure):
    """`Group` of the kernel."""

    _fields_ = (("matrices", _Matrix * MAX_MATRICES), ("count", _INT))


class _Input(ctypes.Structure):
    """`Input` of the kernel."""

    _fields_ = (
        ("x", _POINTER),
        ("stride", _LONG),
        ("num_tokens", _INT),
        ("columns", _INT),
        *((name, _POINTER) for name in ("norm_weight", "positions", "table")),
        ("eps", ctypes.c_float),
        ("head", _INT),
        ("rotary", _INT),
        ("limit", ctypes.c_float),
        ("has_long_positions", _INT),
    )


def has_half_x(device: torch.device) -> bool:
    """Whether E4M3 is multiplied in float16 on a device; a CPU stands for any."""
    if device.type != "cuda":
        return HALF_X
    return HALF_X and torch.cuda.get_device_capability(device) >= HALF_CAPABILITY


@functools.cache
def cuda_source(
    kinds: int,
    kind_of_input: int,
    config: LinearGroupConfig,
    *,
    has_half: bool = False,
) -> rtc.KernelSource:
    """The kernel for some formats, a bit each in the order of `KINDS`.

    has_half: of `has_half_x`.
    """
    macros = (
        ("IS_BF16", 1),
        ("HALF_X", int(has_half)),
        ("KINDS", kinds),
        ("PARTS", config.parts),
        ("TILES", config.tiles),
        ("STAGES", config.stages),
        ("CTAS", config.ctas),
        ("INPUT", kind_of_input),
    )
    return rtc.KernelSource("linear_group", macros)


def smem_bytes(columns: int, num_tokens: int, config: LinearGroupConfig) -> int:
    """Dynamic shared memory of a CTA: x, and sums of warps."""
    sums = config.parts * config.tiles * _SUM_BYTES if config.parts > 1 else 0
    return num_tokens * (2 * columns + 16) + sums


def fits(columns: int, num_tokens: int) -> bool:
    """Whether x fits into shared memory."""
    config = select_linear_group(columns, [], num_tokens)
    return smem_bytes(columns, num_tokens, config) <= CTA_BYTES


def share_ctas(num_blocks: Sequence[int], num_bytes: Sequence[int], slots: int) -> list[int]:
    """How many CTAs each matrix has: one for each block, or all that run at once by its bytes.

    Args:
        num_blocks: of each matrix.
        num_bytes: of each matrix.
        slots: CTAs that run at once.
    """
    if sum(num_blocks) <= slots:
        return list(num_blocks)
    total = sum(num_bytes)
    shares = [
        max(1, min(blocks, slots * size // total))
        for blocks, size in zip(num_blocks, num_bytes, strict=True)
    ]
    most = max(shares)  # makes room for those that have one though their part is less
    shares[shares.index(most)] = max(1, most - max(0, sum(shares) - slots))
    return shares


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _matrix(planes: GroupPlanes, first_cta: int, num_ctas: int, num_blocks: int) -> _Matrix:
    rows, scales, addend = planes.weights.shape[0], planes.scales, planes.addend
    return _Matrix(
        planes.weights.data_ptr(),
        _address(scales),
        planes.out.data_ptr(),
        _address(addend),
        planes.weights.stride(0) * planes.weights.element_size(),
        planes.kind,
        planes.out.shape[1],
        first_cta,
        num_ctas,
        num_blocks,
        rows // planes.num_groups,
        0 if scales is None else scales.stride(0),
        *planes.block,
        int(scales is not None and scales.dtype == torch.float32),
        planes.out.stride(0),
        int(planes.out.dtype == torch.float32),
        0 if addend is None else addend.stride(0),
        int(planes.is_pair),
    )


def _place(
    matrices: Sequence[GroupPlanes], config: LinearGroupConfig, slots: int
) -> tuple[_Group, int, int]:
    """A group with the CTAs of each matrix; how many they are, and the formats' bits."""
    num_blocks = [-(-planes.num_tiles // config.tiles) for planes in matrices]
    num_ctas = share_ctas(num_blocks, [m.weights.nbytes for m in matrices], slots)
    group, first, kinds = _Group(count=len(matrices)), 0, 0
    for place, planes in enumerate(matrices):
        group.matrices[place] = _matrix(planes, first, num_ctas[place], num_blocks[place])
        first += num_ctas[place]
        kinds |= 1 << planes.kind
    return group, first, kinds


def _input(x: Tensor, columns: int, given: GroupInput) -> _Input:
    norm_weight, eps = given.norm or (None, 0.0)
    positions, table = given.rotation or (None, None)
    return _Input(
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        columns,
        *map(_address, (norm_weight, positions, table)),
        eps,
        given.head_dim,
        0 if table is None else 2 * table.shape[2],
        given.limit or 0.0,
        int(positions is not None and positions.dtype == torch.int64),
    )


def launch_linear_group(
    x: Tensor,
    matrices: Sequence[GroupPlanes],
    given: GroupInput,
    config: LinearGroupConfig,
    num_sms: int = H200_SMS,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        x: (tokens, groups * columns) bfloat16; rows a multiple of 16 bytes apart.
        matrices: 1 to `MAX_MATRICES`, of equal columns, each with rows.
        given: what happens to x.
        config: from `select_linear_group`.
        num_sms: multiprocessors of the device.
    """
    num_tokens, columns = x.shape[0], matrices[0].weights.shape[1]
    if num_tokens == 0:
        return
    smem = smem_bytes(columns, num_tokens, config)
    at_once = max(1, min(config.ctas, _SM_BYTES // (smem + _RESERVED_BYTES)))
    group, ctas, kinds = _place(matrices, config, at_once * num_sms)
    source = cuda_source(kinds, given.kind_for(matrices), config, has_half=has_half_x(x.device))
    rtc.launch(
        rtc.load_kernel(source, x.device, smem),
        ctas,
        32 * config.parts * config.tiles,
        [group, _input(x, columns, given)],
        is_dependent=rtc.is_dependent(x.device),
    )
