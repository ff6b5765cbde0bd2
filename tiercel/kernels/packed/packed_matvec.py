"""y = x W^T for up to 16 tokens and a K-quantised W, on tensor cores, read at the speed of memory.

One reader for every number of tokens: cuda/packed_matvec.cu streams tiles of 16 rows through the
fragments of a 16 x 8 product whose columns are tokens. The order in which a row is summed depends
on its length alone, so a token's result has the same bits alone, in any batch of up to 16, at any
place in it, and from either layout of the weights. Weights become fp16 operands (exact integers for
Q4_K, 11 bits for Q6_K), sums are float32, d stays outside: nothing is rounded on the way.

Floor: the planes once. x is read by every CTA, from L2.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.kernels.packed.packed_repack import TILE_ROWS
from tiercel.kernels.packed.packed_types import UNIT_TYPES, num_units, tail_groups
from tiercel.kernels.runtime import rtc

MAX_TOKENS = 16
CAPABILITY = (8, 0)  # cp.async and m16n8k16
BLOCK = 256
SLICE_BLOCKS = 16  # SLICE of the kernel
_PARTS = 8  # of the order of sums; see the kernel
_TOKEN_CLASSES = (1, 4, 8, MAX_TOKENS)  # each has one launch
OUT_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits of a launch: multiprocessors, and bytes of shared memory of a CTA."""

    num_sms: int
    smem_bytes: int


H200 = DeviceLimits(132, 227 << 10)

# (type, tokens) -> groups, stages, early, buffers, best first; those that do not fit are passed
# over. From one run of all launches on an H200 (cold, dependent; docs/notes/packed_products.md).
_LAUNCHES = {
    ("Q4_K", 1): ((2, 3, 1, 2), (2, 2, 1, 2), (1, 2, 1, 2)),
    ("Q4_K", 4): ((2, 3, 1, 2), (2, 2, 1, 2)),
    ("Q4_K", 8): ((2, 2, 1, 2), (2, 2, 1, 1)),
    ("Q4_K", 16): ((2, 2, 1, 1),),
    ("Q6_K", 1): ((2, 2, 1, 2), (1, 2, 1, 2)),
    ("Q6_K", 4): ((1, 3, 1, 2),),
    ("Q6_K", 8): ((1, 3, 1, 2),),
    ("Q6_K", 16): ((2, 1, 1, 2), (2, 1, 1, 1)),
}
# The same for rows whose slices are split: 4096 x 12288, 8 tokens, Q6_K: 16.8 us; 17.0 with both
# units loaded before x.
_SPLIT_LAUNCHES = {
    "Q4_K": ((2, 2, 1, 2, 1), (2, 2, 1, 1, 1)),
    "Q6_K": ((2, 2, 1, 2, 1), (2, 1, 1, 2, 1)),
}
_FEW_TILES = (1, 3, 3, 1, 1)  # no SM has two: 1024 x 4096 4.8 us with two groups, 3.5 so
# Tiles of an SM from which two groups beat one. Two small CTAs an SM beat neither: where a third
# fits, that of the next kernel takes its place and SMs have unequal work (24576 x 4096: 19.2 us).
_LARGE_TILES = 8


class PackedMatvecConfig(Struct, frozen=True):
    """A launch.

    Attributes:
        tokens: of x at most; decides the layout in shared memory.
        parts: warps that share a tile of 16 rows; decides the order of sums.
        groups: tiles at a time in a CTA.
        stages: units of a warp in flight.
        ctas: resident on an SM, for the registers.
        early: units of a warp that are loaded before x.
        buffers: of sums, of a group.
        is_split: slices of long rows go to CTAs of their own.
        grid: CTAs along the rows.
        smem_bytes: of a CTA.
    """

    tokens: int
    parts: int
    groups: int
    stages: int
    early: int
    buffers: int
    ctas: int
    is_split: bool
    grid: int
    smem_bytes: int


def num_slices(in_features: int) -> int:
    """Slices of a row's sum."""
    return -(-in_features // (BLOCK * SLICE_BLOCKS))


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a CUDA device."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return DeviceLimits(num_sms, rtc.max_smem_bytes(device))


@functools.cache
def token_class(tokens: int, type_name: str, limits: DeviceLimits = H200) -> int:
    """The most tokens that share the launch of `tokens`; fewer where shared memory is short.

    More tokens than the largest class takes go in several launches.
    """
    fitting = [
        most
        for most in _TOKEN_CLASSES
        if smem_bytes(type_name, SLICE_BLOCKS, most, _PARTS, 1, _PARTS) <= limits.smem_bytes
    ]
    return next((most for most in fitting if tokens <= most), fitting[-1])


@functools.cache
def select_packed_matvec(
    type_name: str, shape: tuple[int, int], tokens: int, limits: DeviceLimits = H200
) -> PackedMatvecConfig:
    """Choose the launch. Pure: equal in every process, readable by a test.

    Whatever it chooses, the result has the same bits.

    Args:
        type_name: of the weights.
        shape: (rows, in) of W.
        tokens: at most `token_class(tokens, type_name, limits)`.
        limits: of the device.
    """
    tokens = token_class(tokens, type_name, limits)
    blocks, tiles = num_units(shape[1]), -(-shape[0] // TILE_ROWS)
    like = UNIT_TYPES[type_name].like
    launches = [(*launch, 1) for launch in _LAUNCHES[like, tokens]]
    is_small = tiles <= _LARGE_TILES * limits.num_sms and blocks <= SLICE_BLOCKS
    if tokens == 1 and like == "Q4_K" and is_small:
        launches = [(1, 2, 1, 2, 1), *launches]  # 14 MB: 5.6 us, 6.2 with two groups
    if tiles <= limits.num_sms:
        launches = [_FEW_TILES, *launches]
    launches += [(1, 2, 1, 1, 1), (1, 1, 1, 1, 1)]
    configs = [
        make_config(
            type_name,
            blocks,
            tokens,
            *launch,
            _grid(tiles, blocks, launch, split, limits),
            is_split=split,
        )
        for split, tried in ((False, launches), (True, [*_SPLIT_LAUNCHES[like], *launches]))
        for launch in tried
    ]
    return next(config for config in configs if config.smem_bytes <= limits.smem_bytes)


def _grid(
    tiles: int, blocks: int, launch: tuple[int, ...], is_split: bool, limits: DeviceLimits
) -> int:
    """CTAs along the rows: all together on the device, or one for each tile if those are fewer."""
    slices = num_slices(blocks * BLOCK) if is_split else 1
    at_once = max(1, limits.num_sms * launch[4] // slices)
    return min(-(-tiles // launch[0]), at_once)


def make_config(
    type_name: str,
    blocks: int,
    tokens: int,
    groups: int,
    stages: int,
    early: int,
    buffers: int,
    ctas: int,
    grid: int,
    *,
    is_split: bool,
) -> PackedMatvecConfig:
    """A launch for rows of `blocks` units and a class of tokens; see `PackedMatvecConfig`."""
    parts = _PARTS if blocks > _PARTS // 2 else _PARTS // 2
    units = min(blocks, SLICE_BLOCKS) if is_split else blocks
    smem = smem_bytes(type_name, units, tokens, parts, groups * buffers, parts * groups * stages)
    return PackedMatvecConfig(
        tokens, parts, groups, stages, early, buffers, ctas, is_split, grid, smem
    )


def smem_bytes(
    type_name: str, units: int, tokens: int, parts: int, sum_buffers: int, ring_units: int
) -> int:
    """Dynamic shared memory of a CTA: activations and means, sums of parts, rings.

    Args:
        type_name: of the weights.
        units: of a row that the CTA sums.
        tokens: rows of x.
        parts: see `PackedMatvecConfig`.
        sum_buffers: of all groups.
        ring_units: of all warps.
    """
    unit = UNIT_TYPES[type_name]
    activations = units * tokens * (2 * BLOCK + unit.means_bytes)
    sums = -(-units // SLICE_BLOCKS) * parts * -(-tokens // 2) * 128
    return activations + sum_buffers * sums + ring_units * unit.slot_bytes


@functools.cache
def cuda_source(
    type_name: str,
    tail: int,
    out_dtype: torch.dtype,
    config: PackedMatvecConfig,
    *,
    in_file: bool,
) -> rtc.KernelSource:
    """The kernel as built for one kind of call; `tail` is `tail_groups` of a row."""
    unit = UNIT_TYPES[type_name]
    macros = (
        ("QTYPE", unit.code),
        ("SLOT", unit.slot_bytes),
        ("MEANS", unit.means_bytes),
        ("TAIL", tail),
        ("TOKENS", config.tokens),
        ("IN_FILE", int(in_file)),
        ("PARTS", config.parts),
        ("GROUPS", config.groups),
        ("STAGES", config.stages),
        ("OUT", OUT_CODES[out_dtype]),
        ("IS_SPLIT", int(config.is_split)),
        ("EARLY", config.early),
        ("BUFFERS", config.buffers),
        ("CTAS", config.ctas),
        ("IN_STEP", int(UNIT_TYPES[type_name].in_step)),
    )
    return rtc.KernelSource("packed_matvec", macros)


@functools.cache  # every layer has the same few shapes
def load_packed_matvec(
    type_name: str,
    shape: tuple[int, int],
    out_dtype: torch.dtype,
    device: torch.device,
    *,
    in_file: bool,
) -> None:
    """Load what `select_packed_matvec` may choose for a matrix, before a graph is captured."""
    limits = device_limits(device)
    sources = {}
    for tokens in {token_class(most, type_name, limits) for most in _TOKEN_CLASSES}:
        config = select_packed_matvec(type_name, shape, tokens, limits)
        tail = tail_groups(shape[1])
        source = cuda_source(type_name, tail, out_dtype, config, in_file=in_file)
        sources[source] = config.smem_bytes
    rtc.fill_cache(sources, rtc.device_arch(device))
    for source, smem in sources.items():
        rtc.load_kernel(source, device, smem)


class KernelPlanes(ctypes.Structure):
    """Planes of the kernels: addresses, passed by value."""

    _fields_ = (("planes", ctypes.c_void_p * 4),)

    @classmethod
    def of(cls, planes: Sequence[Tensor]) -> KernelPlanes:
        """Their addresses, in order; after a table of rows (layout STEP) its number of slices."""
        result = cls()
        for place, plane in enumerate(planes):
            result.planes[place] = plane.data_ptr()
        if planes and planes[-1].dtype == torch.int32:
            result.planes[len(planes)] = planes[-1].shape[0]
        return result


def launch_packed_matvec(
    x: Tensor,
    planes: Sequence[Tensor],
    type_name: str,
    out: Tensor,
    partial: Tensor | None,
    tickets: Tensor | None,
    config: PackedMatvecConfig,
    *,
    is_dependent: bool,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        x: (tokens, in) float16, contiguous, of one `token_class`.
        planes: of W (rows, in) on x's device, contiguous, in their order; one in the file's layout.
        type_name: of W.
        out: (tokens, rows) float16, bfloat16 or float32, unit inner stride.
        partial: (slices, tokens, rows up to a multiple of 16) float32 where the config splits.
        tickets: (tiles,) int32 zeros where it splits; zeros again afterwards.
        config: from `select_packed_matvec`.
        is_dependent: see `rtc.launch`.
    """
    tokens, in_features = x.shape
    in_file = len(planes) == 1
    tail = tail_groups(in_features)
    source = cuda_source(type_name, tail, out.dtype, config, in_file=in_file)
    kernel = rtc.load_kernel(source, x.device, config.smem_bytes)
    arguments = [
        KernelPlanes.of(planes),
        rtc.pointer(x),
        rtc.pointer(out),
        ctypes.c_void_p(0) if partial is None else rtc.pointer(partial),
        ctypes.c_void_p(0) if tickets is None else rtc.pointer(tickets),
        *map(ctypes.c_int, (out.shape[1], num_units(in_features), tokens)),
        *map(ctypes.c_int, (x.stride(0), out.stride(0))),
    ]
    rtc.launch(
        kernel,
        config.grid,
        32 * config.parts * config.groups,
        arguments,
        grid_y=num_slices(in_features) if config.is_split else 1,
        is_dependent=is_dependent,
    )
