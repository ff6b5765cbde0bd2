"""Routed experts of many tokens, from stacks in layout TILES, at the speed of tensor cores.

Five launches: cuda/moe/moe_experts_gemm_table.cu cuts the pairs (token, slot) into tiles of one
expert, moe_experts_gemm_image.cu copies the tokens into them as products read them,
moe_experts_gemm.cu multiplies by gate and up and then by down, decoding weights once a tile, and
moe_experts_gemm_sum.cu adds the slots. Hopper alone has the instructions. Weights are rounded to
bfloat16. A token's bits depend on neither its batch nor its place in a tile.

Floor: 6 * hidden * inter operations a pair, or the weights of each expert in use read once.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tiercel.kernels.moe.moe_experts_tiles import (
    GRID_WORDS,
    UNITS,
    ExpertsShape,
    KernelStack,
    num_units,
    total_code,
)
from tiercel.kernels.moe.stack_planes import StackPlanes
from tiercel.kernels.packed.packed_matvec import OUT_CODES
from tiercel.kernels.runtime import rtc
from tiercel.quant_types import IQ2_XXS_GRID

CAPABILITY: Final = (9, 0)
TOKEN_STEP: Final = 16
"""Tokens of a tile, with its padding, are a multiple of it."""
# Flash, uniform routing, against moe_experts_tiles: Q2_K, 6 pairs an expert 1.42 and 0.84 ms, 12
# 1.38 and 1.36; MXFP4, 12 1.69 and 2.04 (H200, docs/notes/expert_tiles.md).
LEAST_PAIRS: Final = 8
"""Of an expert on average: fewer are faster with moe_experts_tiles."""
_SMEM_BYTES: Final = 225 << 10  # of 227, less barriers and lists
_MOST_QUARTERS: Final = 12
_MOST_EXPERTS: Final = 2048  # of the table's shared memory
_MOST_COLUMNS: Final = 24 << 10  # likewise of the image's
_TABLE_THREADS: Final = 1024
_IMAGE_THREADS: Final = 256
_SUM_THREADS: Final = 256
_SUM_COLUMNS: Final = 4 * _SUM_THREADS


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """A launch.

    Attributes:
        tokens: of a tile at most, a multiple of `TOKEN_STEP` up to 128.
        groups: warpgroups of 128 rows in a CTA.
        units: of weights in flight.
        quarters: of units of tokens in flight.
        batch: quarters of a unit that are decoded at once.
        ctas: of an SM.
    """

    tokens: int
    groups: int
    units: int
    quarters: int
    batch: int = 1
    ctas: int = 1

    @property
    def threads(self) -> int:
        """Of a CTA: its warpgroups and the producer's."""
        return 128 * (self.groups + 1)

    def smem_bytes(self, kind: str) -> int:
        """Dynamic shared memory of a CTA."""
        weights = self.units * 8 * self.groups * UNITS[kind].num_bytes
        grid = 4 * GRID_WORDS if kind == "IQ2_XXS" else 0
        barriers = 16 * (self.units + self.quarters)
        return weights + self.quarters * self.tokens * 128 + grid + barriers


def make_config(kind: str, tokens: int, groups: int, units: int = 2, batch: int = 1) -> GemmConfig:
    """The launch with as many quarters in flight as fit."""
    used = GemmConfig(tokens, groups, units, 0).smem_bytes(kind)
    quarters = min((_SMEM_BYTES - used) // (tokens * 128), _MOST_QUARTERS)
    return GemmConfig(tokens, groups, units, quarters, batch)


@functools.cache
def select_gemm(kind: str) -> GemmConfig:
    """Choose the launch of a type of weights. Pure."""
    # 4096 tokens of Flash: Q2_K 2.68 ms instead of 2.87 (H200, docs/notes/expert_prompts.md).
    return make_config(kind, 128, 2, batch=2 if kind == "Q2_K" else 1)


def gemm_refusal(shape: ExpertsShape, num_pairs: int, capability: tuple[int, int]) -> str:
    """Why the kernels do not multiply so many pairs, without a full stop; "" if they do. Pure.

    Args:
        shape: of the stacks, in layout TILES.
        num_pairs: tokens times slots.
        capability: of the GPU.
    """
    found = ".".join(map(str, capability))
    checks = {
        f"{num_pairs} pairs are fewer than {LEAST_PAIRS} an expert": num_pairs
        < LEAST_PAIRS * shape.experts,
        f"the GPU has compute capability {found}, not 9.0": capability != CAPABILITY,
        f"{shape.experts} experts are more than {_MOST_EXPERTS}": shape.experts > _MOST_EXPERTS,
        f"rows of {shape.hidden} columns do not fit shared memory": shape.hidden > _MOST_COLUMNS,
    }
    return next((reason for reason, refuses in checks.items() if refuses), "")


def most_gemm_tiles(num_pairs: int, experts: int, tokens: int) -> int:
    """Tiles that suffice for any routing. Pure."""
    return min(num_pairs, num_pairs // tokens + experts)


def most_rows(num_pairs: int, experts: int, tokens: int) -> int:
    """Rows of images that suffice for any routing. Pure."""
    return num_pairs + TOKEN_STEP * most_gemm_tiles(num_pairs, experts, tokens)


@functools.cache
def table_source(experts: int, tokens: int) -> rtc.KernelSource:
    """The kernel that makes the tiles."""
    return rtc.KernelSource("moe_experts_gemm_table", (("EXPERTS", experts), ("TOKENS", tokens)))


@functools.cache
def image_source(kind: str, cols: int, topk: int) -> rtc.KernelSource:
    """The kernel that copies the tokens."""
    macros = (("KIND", UNITS[kind].code), ("COLS", cols), ("TOPK", topk))
    return rtc.KernelSource("moe_experts_gemm_image", macros)


@functools.cache
def sum_source(cols: int, topk: int, out_dtype: torch.dtype) -> rtc.KernelSource:
    """The kernel that adds the slots."""
    macros = (("COLS", cols), ("TOPK", topk), ("OUT", OUT_CODES[out_dtype]))
    return rtc.KernelSource("moe_experts_gemm_sum", macros)


@functools.cache
def gemm_source(
    phase: int, kinds: tuple[str, str], shape: tuple[int, int], total: int, config: GemmConfig
) -> rtc.KernelSource:
    """The kernel that multiplies.

    Args:
        phase: 0 for gate and up, 1 for down.
        kinds: of gate and up, and of down.
        shape: (rows, columns) of a matrix.
        total: of its stack (`total_code`).
        config: the launch.
    """
    macros = (
        ("PHASE", phase),
        ("KIND", UNITS[kinds[phase]].code),
        ("DOWN_KIND", UNITS[kinds[1]].code),
        ("COLS", shape[1]),
        ("ROWS", shape[0]),
        ("TOKENS", config.tokens),
        ("WGS", config.groups),
        ("UNITS_AHEAD", config.units),
        ("QUARTERS_AHEAD", config.quarters),
        ("BATCH", config.batch),
        ("TOTAL", total),
        ("CTAS", config.ctas),
        ("IS_BF16", 1),
    )
    return rtc.KernelSource("moe_experts_gemm", macros)


_GRID: Final = (ctypes.c_ubyte * len(IQ2_XXS_GRID))(*IQ2_XXS_GRID)


class _Work(ctypes.Structure):
    """Struct Work of the kernel."""

    _fields_ = (
        *((name, KernelStack) for name in ("first", "second")),
        *((name, ctypes.c_void_p) for name in ("image", "tiles", "pairs", "weights", "h", "y")),
        ("limit", ctypes.c_float),
        ("num_tiles", ctypes.c_int),
        ("grid", ctypes.c_ubyte * len(IQ2_XXS_GRID)),
    )


@dataclass(frozen=True, slots=True)
class GemmWorkspace:
    """What a call needs besides its arguments.

    Attributes:
        tiles: (tiles + 1, 4) int32.
        pairs: (rows,) int32.
        places: (num_pairs, 2) int32.
        image: (rows, padded hidden) bfloat16.
        h: (rows, padded inter) bfloat16.
        y: (num_pairs, hidden) float32.
        inter: columns of h that count.
    """

    tiles: Tensor
    pairs: Tensor
    places: Tensor
    image: Tensor
    h: Tensor
    y: Tensor
    inter: int

    @classmethod
    def make(
        cls, num_pairs: int, experts: int, shape: tuple[int, int], tokens: int, device: torch.device
    ) -> GemmWorkspace:
        """Allocate for `shape` (hidden, inter) and tiles of so many tokens."""
        num_tiles = most_gemm_tiles(num_pairs, experts, tokens)
        rows = most_rows(num_pairs, experts, tokens)
        ints, bf16 = (
            functools.partial(torch.empty, dtype=dtype, device=device)
            for dtype in (torch.int32, torch.bfloat16)
        )
        hidden, inter = shape
        return cls(
            ints((num_tiles + 1, 4)),
            ints((rows,)),
            ints((num_pairs, 2)),
            bf16((rows, num_units(hidden) * 256)),
            bf16((rows, num_units(inter) * 256)),
            torch.empty((num_pairs, hidden), dtype=torch.float32, device=device),
            inter,
        )


def launch_moe_experts_gemm(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stacks: Sequence[StackPlanes],
    limit: float | None,
    workspace: GemmWorkspace,
    configs: tuple[GemmConfig, GemmConfig],
    *,
    is_dependent: bool,
) -> None:
    """Enqueue; the op has checked and allocated.

    Args:
        out: (T, hidden) float, contiguous, written; T > 0.
        x: (T, hidden) bfloat16, contiguous.
        ids: (T, topk) int64, contiguous; -1 for an expert of another rank.
        weights: (T, topk) float32, contiguous.
        stacks: w1, w3 and w2 in layout TILES, the first two alike but for their numbers.
        limit: of the clamped SwiGLU; None for no clamp.
        workspace: of the configs' `tokens`.
        configs: of gate and up and of down, with the same `tokens`.
        is_dependent: see `rtc.launch`. The kernel ahead, and those before it, may write x, ids and
            weights.
    """
    gate, up, down = stacks
    (num_tokens, topk), hidden = ids.shape, x.shape[1]
    experts, tokens = gate.q.shape[0], configs[0].tokens
    made, device = workspace, x.device
    kinds, inter = (gate.kind, down.kind), made.inter
    num_tiles = made.tiles.shape[0] - 1
    launch = functools.partial(rtc.launch, is_dependent=is_dependent)

    table = rtc.load_kernel(table_source(experts, tokens), device)
    numbers = (ctypes.c_int(ids.numel()), ctypes.c_int(num_tiles))
    arguments = [rtc.pointer(v) for v in (ids, made.tiles, made.pairs, made.places)]
    launch(table, 1, _TABLE_THREADS, [*arguments, *numbers])

    image = rtc.load_kernel(image_source(gate.kind, hidden, topk), device)
    arguments = [rtc.pointer(v) for v in (x, made.places, made.image)]
    launch(image, num_tokens, _IMAGE_THREADS, arguments)

    shapes = ((inter, hidden), (hidden, inter))
    for phase, (config, shape) in enumerate(zip(configs, shapes, strict=True)):
        total = total_code(down if phase else gate)
        source = gemm_source(phase, kinds, shape, total, config)
        kernel = rtc.load_kernel(source, device, config.smem_bytes(kinds[phase]))
        first, second = (down, down) if phase else (gate, up)
        tensors = (made.h if phase else made.image, made.tiles, made.pairs, weights, made.h, made.y)
        work = _Work(
            KernelStack.of(first),
            KernelStack.of(second),
            *(tensor.data_ptr() for tensor in tensors),
            math.inf if limit is None else limit,
            num_tiles,
            _GRID,
        )
        # Of h all columns of its units are written.
        rows = shape[0] if phase else num_units(inter) * 256
        items = math.ceil(rows / ((128 if phase else 64) * config.groups))
        launch(kernel, num_tiles * items, config.threads, [work])

    adder = rtc.load_kernel(sum_source(hidden, topk, out.dtype), device)
    grid_y = math.ceil(hidden / _SUM_COLUMNS)
    arguments = [rtc.pointer(v) for v in (made.y, made.places, out)]
    launch(adder, num_tokens, _SUM_THREADS, arguments, grid_y=grid_y)
