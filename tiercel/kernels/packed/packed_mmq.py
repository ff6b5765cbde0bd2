"""y = x W^T with x rounded to 8 bits and a K-quantised W, by the integer products of tensor cores.

Two launches. cuda/packed_mmq_quantise.cu rounds each 32 columns of a token to 8 bits with a scale
of their own, cuda/packed_mmq.cu streams W and them through a ring. W stays as small as its file, in
either layout with the same bits, and nothing of it is rounded; each group's sum is scaled in
float32, and those two FMAs a sum are what bounds it: about as many cycles as the products.

Floor: the larger of the planes read once and 2 * tokens * rows * columns operations.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiercel.kernels.packed.packed_matvec import BLOCK, H200, OUT_CODES, DeviceLimits, KernelPlanes
from tiercel.kernels.packed.packed_repack import TILE_ROWS
from tiercel.kernels.runtime import rtc

CAPABILITY = (8, 0)  # cp.async and products of 8 bits in tiles of 16 x 8
TYPES = ("Q4_K", "Q6_K")
ROWS = 128  # of a CTA
TOKEN_TILES = (128, 64, 32)  # tokens of a CTA
# Tokens -> stages of the ring, CTAs of an SM. 512 tokens times 24576 x 4096 (Q4_K) took 428, 454
# and more us; with three stages, so one CTA an SM, 64 tokens took 544 (H200).
_RINGS = {128: (3, 1), 64: (2, 2), 32: (2, 2)}
# Microseconds of a unit of a CTA on an SM that is full, by tokens; H200, the same run.
_UNIT_US = {"Q4_K": {128: 4.3, 64: 4.5, 32: 3.2}, "Q6_K": {128: 7.1, 64: 7.7, 32: 5.0}}
_TAIL = 0.65  # of that, where others have left an SM to one of two CTAs
_CTA_US = 4.0  # to start and to end
_PARTIAL_US = 0.8e-6  # a byte of sums that pass through memory
_TILE_BYTES = {"Q4_K": 2304, "Q6_K": 3360}  # 16 rows of a unit
_TABLE_BYTES = {"Q4_K": 6656, "Q6_K": 8192}
_TOKEN_BYTES = 320  # of a unit: 256 bytes, 8 scales, 8 means in two fp16 each
_THREADS = 256
_QUANTISE_THREADS = 64  # 64 tokens x 4096 columns are 4096 threads
_MOST_SPLITS = 8


@dataclass(frozen=True, slots=True)
class PackedMmqConfig:
    """A launch.

    Attributes:
        tokens: of a CTA.
        splits: CTAs that share a row's sum; decides its order.
        stages: units in the ring.
        ctas: of an SM, for the registers.
    """

    tokens: int
    splits: int
    stages: int
    ctas: int

    def smem_bytes(self, type_name: str) -> int:
        """Dynamic shared memory of a CTA: its ring and tables, or its sums."""
        unit = ROWS // TILE_ROWS * _TILE_BYTES[type_name] + self.tokens * _TOKEN_BYTES
        tables = 1 if self.stages == 2 else 2
        ring = self.stages * unit + tables * _TABLE_BYTES[type_name]
        return max(ring, self.tokens * (ROWS + 4) * 4)


def make_config(tokens: int, splits: int = 1) -> PackedMmqConfig:
    """The launch for one of `TOKEN_TILES`."""
    return PackedMmqConfig(tokens, splits, *_RINGS[tokens])


def fitting_tiles(type_name: str, limits: DeviceLimits) -> list[int]:
    """Of `TOKEN_TILES`, those that a device has the shared memory for."""
    smem = limits.smem_bytes
    return [tile for tile in TOKEN_TILES if make_config(tile).smem_bytes(type_name) <= smem]


@functools.cache
def select_packed_mmq(
    type_name: str, shape: tuple[int, int], tokens: int, limits: DeviceLimits = H200
) -> PackedMmqConfig:
    """Choose the launch that should take least. Pure: equal in every process, readable by a test.

    Args:
        type_name: of the weights.
        shape: (rows, in) of W.
        tokens: > 0.
        limits: of a device that one of `fitting_tiles` fits.
    """
    units, row_tiles = shape[1] // BLOCK, -(-shape[0] // ROWS)
    num_tickets = -(-shape[0] // TILE_ROWS)  # that a weight has

    def cost_us(config: PackedMmqConfig) -> float:
        groups = row_tiles * -(-tokens // config.tokens)
        if config.splits > 1 and groups > num_tickets:
            return float("inf")
        waves, rest = divmod(groups * config.splits, limits.num_sms * config.ctas)
        row_us = -(-units // config.splits) * _UNIT_US[type_name][config.tokens]
        is_tail = waves > 0 and config.ctas > 1 and rest <= limits.num_sms
        last_us = row_us * (_TAIL if is_tail else 1) + _CTA_US if rest else 0
        partial = config.splits * tokens * shape[0] * 4 if config.splits > 1 else 0
        return waves * (row_us + _CTA_US) + last_us + partial * _PARTIAL_US

    splits = range(1, min(units, _MOST_SPLITS) + 1)
    launches = itertools.product(fitting_tiles(type_name, limits), splits)
    return min(itertools.starmap(make_config, launches), key=cost_us)


def quantise_source(tokens: int) -> rtc.KernelSource:
    """The kernel that rounds x, for tiles of so many tokens."""
    return rtc.KernelSource("packed_mmq_quantise", (("TOKENS", tokens),))


def mmq_source(
    type_name: str, out_dtype: torch.dtype, config: PackedMmqConfig, *, in_file: bool
) -> rtc.KernelSource:
    """The kernel that multiplies, as built for one kind of call."""
    macros = (
        ("QTYPE", 4 if type_name == "Q4_K" else 6),
        ("IN_FILE", int(in_file)),
        ("TOKENS", config.tokens),
        ("STAGES", config.stages),
        ("CTAS", config.ctas),
        ("OUT", OUT_CODES[out_dtype]),
    )
    return rtc.KernelSource("packed_mmq", macros)


@functools.cache
def _kernels(
    type_name: str,
    out_dtype: torch.dtype,
    config: PackedMmqConfig,
    device: torch.device,
    *,
    in_file: bool,
) -> tuple[rtc.Kernel, rtc.Kernel]:
    quantise = rtc.load_kernel(quantise_source(config.tokens), device)
    source = mmq_source(type_name, out_dtype, config, in_file=in_file)
    return quantise, rtc.load_kernel(source, device, config.smem_bytes(type_name))


@functools.cache  # every layer has the same few types
def load_packed_mmq(
    type_name: str,
    out_dtype: torch.dtype,
    device: torch.device,
    limits: DeviceLimits,
    *,
    in_file: bool,
) -> None:
    """Load what `select_packed_mmq` may choose for a type; call it before a graph is captured."""
    configs = [make_config(tokens) for tokens in fitting_tiles(type_name, limits)]
    sources = [mmq_source(type_name, out_dtype, c, in_file=in_file) for c in configs]
    rtc.fill_cache(sources, rtc.device_arch(device))
    for config in configs:
        _kernels(type_name, out_dtype, config, device, in_file=in_file)


def image_shape(tokens: int, in_features: int, config: PackedMmqConfig) -> tuple[int, int]:
    """Of the image of so many tokens, uint8: tiles by bytes."""
    return -(-tokens // config.tokens), config.tokens * in_features // BLOCK * _TOKEN_BYTES


def partial_shape(tokens: int, rows: int, config: PackedMmqConfig) -> tuple[int, int, int]:
    """Of the sums that pass through memory: splits, tokens, rows of all CTAs."""
    return config.splits, tokens, -(-rows // ROWS) * ROWS


def launch_packed_mmq(
    x: Tensor,
    planes: Sequence[Tensor],
    type_name: str,
    image: Tensor,
    out: Tensor,
    partial: Tensor | None,
    tickets: Tensor,
    config: PackedMmqConfig,
    *,
    is_dependent: bool,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        x: (tokens, in) float16, contiguous.
        planes: of W (rows, in) on x's device, contiguous, in their order; one in the file's layout.
        type_name: of W, in `TYPES`.
        image: of `image_shape`, uint8, overwritten.
        out: (tokens, rows) float16, bfloat16 or float32, unit inner stride.
        partial: of `partial_shape`, float32, where the config splits.
        tickets: (tiles,) int32 zeros; zeros again afterwards.
        config: from `select_packed_mmq`.
        is_dependent: see `rtc.launch`.
    """
    tokens, in_features = x.shape
    rows, units, tiles = out.shape[1], in_features // BLOCK, image.shape[0]
    in_file = len(planes) == 1
    whole = replace(config, splits=1)  # splits are no property of the kernel
    quantise, multiply = _kernels(type_name, out.dtype, whole, x.device, in_file=in_file)
    threads = tiles * config.tokens * units * 4
    arguments = [rtc.pointer(x), rtc.pointer(image), *map(ctypes.c_int, (tokens, units))]
    grid = -(-threads // _QUANTISE_THREADS)
    rtc.launch(quantise, grid, _QUANTISE_THREADS, arguments, is_dependent=is_dependent)
    arguments = [
        KernelPlanes.of(planes),
        rtc.pointer(image),
        rtc.pointer(out),
        ctypes.c_void_p(0) if partial is None else rtc.pointer(partial),
        rtc.pointer(tickets),
        *map(ctypes.c_int, (rows, units, tokens, out.stride(0))),
    ]
    rtc.launch(
        multiply,
        tiles,
        _THREADS,
        arguments,
        grid_y=-(-rows // ROWS),
        grid_z=config.splits,
        is_dependent=is_dependent,
    )
