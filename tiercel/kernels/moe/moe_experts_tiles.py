"""Routed experts of stacks in layout TILES: one launch that reads them at the speed of memory.

The kernel, cuda/moe/moe_experts_tiles.cu, sorts the pairs (token, slot), multiplies gate and up,
then down, and adds the slots. Its CTAs wait for each other, so the launch is cooperative. What
decides the order of a sum is the length of its row alone (`select_parts`): a token's bits depend
neither on its batch nor on the launch. A single token has a launch of its own, with less waiting.

Floor: the weights of each expert in use are read once.
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

from tiercel.kernels.moe.stack_planes import StackPlanes
from tiercel.kernels.packed.packed_matvec import H200, OUT_CODES, DeviceLimits
from tiercel.kernels.runtime import rtc
from tiercel.quant_types import IQ2_XXS_GRID, TILE_ROWS

MOST_FOLDED: Final = 512
"""Pairs that each CTA sorts by itself."""
MOST_EXPERTS: Final = 1 << 16
CAPABILITY: Final = (8, 0)  # cp.async, products of bfloat16
_UNIT_COLUMNS: Final = 256
_LEAST_PARTS: Final = 4  # if there are so many units
_MOST_PARTS: Final = 8
_WARPS: Final = 16
_LISTED_WORDS: Final = 4  # of a pair in the list of chunks
_FLAG_WORDS: Final = 20  # and items that groups of warps have written
GRID_WORDS: Final = 256
_COPIED: Final = 8  # columns of x that are read together
# Types of which a warp more, that counts, leaves the others enough registers. One token of Flash:
# 26.9 instead of 28.2 us (MXFP4), 19.9 instead of 20.7 (Q2_K; H200, docs/notes/expert_tiles.md).
_COUNTED: Final = frozenset(("Q2_K", "MXFP4", "NVFP4"))
_MOST_SINGLE: Final = 16
"""Slots of a single token: its sums are where others have lists."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """A type.

    Attributes:
        code: in the kernel.
        num_bytes: of a unit.
        means: bytes of a token's sums beside 256 columns.
        warps: of a CTA at most: more do not find enough registers.
    """

    code: int
    num_bytes: int
    means: int = 0
    warps: int = _WARPS


UNITS: Final = {
    "Q2_K": _Unit(2, 1344, 48),
    "Q3_K": _Unit(3, 1760),
    "Q4_K": _Unit(4, 2304, 32, warps=8),
    "Q5_K": _Unit(5, 2816, 32, warps=8),
    "Q6_K": _Unit(6, 3360, warps=8),
    "Q8_0": _Unit(8, 4352),
    "IQ2_XXS": _Unit(12, 1056),
    "MXFP4": _Unit(32, 2176),
    "NVFP4": _Unit(16, 2304),
}
KINDS: Final = tuple(UNITS)


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """What decides a kernel.

    Attributes:
        experts: of a stack.
        hidden: columns of gate and up.
        inter: columns of down.
        topk: slots of a token.
        gate: type of gate and up, of `KINDS`.
        down: type of down.
    """

    experts: int
    hidden: int
    inter: int
    topk: int
    gate: str
    down: str


@dataclass(frozen=True, slots=True)
class TilesConfig:
    """A launch.

    Attributes:
        columns: tokens of a chunk at most.
        warps: of a CTA.
        stages: units of a warp in flight.
        buffers: of sums, of a group of warps.
        ctas: of an SM.
        single: warps that share an item of gate and up, and of down, if there is one token.
        has_counter: whether one more warp counts for that token what the others have written.
    """

    columns: int
    warps: int
    stages: int
    buffers: int
    ctas: int = 1
    single: tuple[int, int] | None = None
    has_counter: bool = False


# Warps at most, stages, buffers; the first that fits is taken. One token of Flash, Q2_K: 2 stages
# 20.8 us, 4 stages 22.4, 8 warps 23.4 (H200, docs/notes/expert_tiles.md).
_LAUNCHES: Final = (
    (_WARPS, 2, 2),
    (_WARPS, 2, 1),
    (_WARPS, 1, 2),
    (8, 3, 2),
    (8, 2, 1),
    (8, 1, 1),
)
_COLUMNS: Final = (1, 2, 4, 8)  # tokens of a chunk at most
# 64 tokens of Flash, Q2_K, 1.5 pairs an expert: chunks of 4 tokens 425 us, of 8 462; skewed 332
# and 332; MXFP4 815 and 703 (as above).
_FEW_COLUMNS: Final = 4
_FEW_PAIRS: Final = 2


def num_units(columns: int) -> int:
    """Units of a row."""
    return math.ceil(columns / _UNIT_COLUMNS)


@functools.cache
def select_parts(units: int) -> int:
    """Warps that share a row of so many units: those whose shares are most equal. Pure.

    With two units each or more, if there are: the warps meet once an item.
    """
    best = min(units, _MOST_PARTS)
    for parts in range(best, min(units, _LEAST_PARTS) - 1, -1):
        share, least = math.ceil(units / parts), math.ceil(units / best)
        if share * parts < least * best or (share * parts == least * best and least < 2):
            best = parts
    return best


def select_warps(units: int, items: int, warps: int) -> int:
    """Warps that share an item, where a CTA has few: those with the fewest turns of a unit. Pure.

    Args:
        units: of a row.
        items: of a CTA.
        warps: of a CTA.
    """
    parts = select_parts(units)
    shares = [parts * n for n in range(1, units // parts + 1) if parts * n <= warps]
    return min(shares, key=lambda n: math.ceil(items / (warps // n)) * math.ceil(units / n))


def _single_warps(shape: ExpertsShape, warps: int, num_sms: int) -> tuple[int, int] | None:
    if shape.topk > _MOST_SINGLE:
        return None
    tiles = math.ceil(shape.inter / TILE_ROWS)
    places = math.ceil(shape.hidden / (2 * TILE_ROWS))
    return (
        select_warps(num_units(shape.hidden), math.ceil(shape.topk * tiles / num_sms), warps),
        select_warps(num_units(shape.inter), math.ceil(places / num_sms) * shape.topk, warps),
    )


def item_warps(shape: ExpertsShape, config: TilesConfig) -> tuple[int, int]:
    """Warps that share an item of gate and up, and of down. Pure."""
    if config.single is not None:
        return config.single
    return select_parts(num_units(shape.hidden)), select_parts(num_units(shape.inter))


def smem_bytes(shape: ExpertsShape, config: TilesConfig) -> int:
    """Dynamic shared memory of a CTA: rings, sums of parts, tokens, the list of chunks."""
    slot = max(UNITS[shape.gate].num_bytes, UNITS[shape.down].num_bytes)
    ring = config.warps * config.stages * 2 * slot
    groups = 0  # of warps, times slots of an item's sums
    for columns, shared in zip((shape.hidden, shape.inter), item_warps(shape, config), strict=True):
        units = num_units(columns)
        slots = shared if shared == select_parts(units) else units
        groups = max(groups, config.warps // shared * slots)
    sums = groups * config.buffers * 2 * 128 * ((config.columns + 1) // 2)
    rows = max(
        num_units(columns) * (2 * _UNIT_COLUMNS + UNITS[kind].means) * tokens
        for columns, kind, tokens in (
            (shape.hidden, shape.gate, config.columns),
            (shape.inter, shape.down, shape.topk if config.single else config.columns),
        )
    )
    held = shape.topk if config.single else config.columns
    words = 2 * held + _FLAG_WORDS + shape.experts + _LISTED_WORDS * MOST_FOLDED
    words += GRID_WORDS * ("IQ2_XXS" in (shape.gate, shape.down))
    return ring + sums + rows + 4 * words


@functools.cache
def select_tiles(
    shape: ExpertsShape, num_tokens: int, limits: DeviceLimits = H200
) -> TilesConfig | None:
    """Choose the launch; None if shared memory is too small. Pure."""
    most = next((most for most in _COLUMNS if num_tokens <= most), _COLUMNS[-1])
    if shape.gate == shape.down == "Q2_K" and num_tokens * shape.topk <= _FEW_PAIRS * shape.experts:
        most = min(most, _FEW_COLUMNS)
    parts = max(select_parts(num_units(shape.hidden)), select_parts(num_units(shape.inter)))
    most_warps = min(UNITS[shape.gate].warps, UNITS[shape.down].warps)
    launches = [launch for launch in _LAUNCHES if launch[0] <= most_warps]
    kinds = [(1, True)] * (num_tokens == 1)
    kinds += [(fewer, False) for fewer in reversed(_COLUMNS) if fewer <= most]
    for columns, is_single in kinds:
        for warps, stages, buffers in launches:
            used = warps // parts * parts
            single = _single_warps(shape, used, limits.num_sms) if is_single else None
            has_counter = single is not None and {shape.gate, shape.down} <= _COUNTED
            config = TilesConfig(
                columns, used, stages, buffers, single=single, has_counter=has_counter
            )
            if smem_bytes(shape, config) <= limits.smem_bytes:
                return config
    return None


def tiles_refusal(
    stacks: Sequence[StackPlanes | None],
    shape: tuple[int, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
    limits: DeviceLimits,
) -> str:
    """Why the kernel does not multiply some stacks, without a full stop; "" if it does. Pure.

    Args:
        stacks: w1, w3 and w2; None for a type without planes.
        shape: (hidden, inter).
        dtype: of x.
        capability: of the GPU.
        limits: of the GPU.
    """
    gate, up, down = stacks
    if gate is None or up is None or down is None or {gate.kind, up.kind, down.kind} - set(KINDS):
        return f"of the types, it reads {', '.join(KINDS)} alone"
    hidden, inter = shape
    made = ExpertsShape(gate.q.shape[0], hidden, inter, 1, gate.kind, down.kind)
    found, name = ".".join(map(str, capability)), str(dtype).removeprefix("torch.")
    checks = {
        "gate and up are of different types": (gate.kind, total_code(gate))
        != (up.kind, total_code(up)),
        f"activations are {name}, not bfloat16": dtype != torch.bfloat16,
        f"the GPU has compute capability {found}, below 8.0": capability < CAPABILITY,
        f"{made.experts} experts are more than {MOST_EXPERTS}": made.experts > MOST_EXPERTS,
        f"{hidden} and {inter} are no multiples of {_COPIED}": (hidden | inter) % _COPIED != 0,
        f"rows of {hidden} and {inter} columns do not fit shared memory": not select_tiles(
            made, 1, limits
        ),
    }
    return next((reason for reason, refuses in checks.items() if refuses), "")


@functools.cache
def cuda_source(
    shape: ExpertsShape,
    config: TilesConfig,
    out_dtype: torch.dtype,
    totals: tuple[int, int],
    *,
    is_folded: bool,
) -> rtc.KernelSource:
    """The kernel as built for one kind of call; totals: of gate and up, of down (`total_code`)."""
    macros = (
        ("GATE_TYPE", UNITS[shape.gate].code),
        ("DOWN_TYPE", UNITS[shape.down].code),
        ("HIDDEN", shape.hidden),
        ("INTER", shape.inter),
        ("EXPERTS", shape.experts),
        ("TOPK", shape.topk),
        ("COLUMNS", config.columns),
        ("WARPS", config.warps),
        ("GATE_PARTS", select_parts(num_units(shape.hidden))),
        ("DOWN_PARTS", select_parts(num_units(shape.inter))),
        ("GATE_WARPS", item_warps(shape, config)[0]),
        ("DOWN_WARPS", item_warps(shape, config)[1]),
        ("STAGES", config.stages),
        ("BUFFERS", config.buffers),
        ("FOLDS", MOST_FOLDED if is_folded else 0),
        ("GATE_TOTAL", totals[0]),
        ("DOWN_TOTAL", totals[1]),
        ("OUT", OUT_CODES[out_dtype]),
        ("CTAS", config.ctas),
        ("SINGLE", int(config.single is not None)),
        ("COUNTER", int(config.has_counter)),
    )
    return rtc.KernelSource("moe_experts_tiles", macros)


def total_code(stack: StackPlanes) -> int:
    """Whether a stack has a number for each matrix: 0 none, 1 a factor, 2 a divisor."""
    return 0 if stack.total is None else 1 + stack.is_divisor


def num_tickets(num_chunks: int) -> int:
    """Counters of a launch: two of CTAs, and of each chunk."""
    return 2 + num_chunks


_GRID: Final = (ctypes.c_ubyte * len(IQ2_XXS_GRID))(*IQ2_XXS_GRID)


class KernelStack(ctypes.Structure):
    """Struct Stack of the kernel."""

    _fields_ = (("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("total", ctypes.c_void_p))

    @classmethod
    def of(cls, stack: StackPlanes) -> KernelStack:
        """The addresses of its planes."""
        planes = (stack.q, stack.scale, stack.total)
        return cls(*(None if plane is None else plane.data_ptr() for plane in planes))


class _Work(ctypes.Structure):
    """Struct Work of the kernel."""

    _fields_ = (
        *((name, KernelStack) for name in ("gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("x", "ids", "weights", "of_chunks", "pairs")),
        *((name, ctypes.c_void_p) for name in ("h", "y", "out", "addend", "tickets")),
        ("limit", ctypes.c_float),
        ("num_tokens", ctypes.c_int),
        ("num_chunks", ctypes.c_int),
        ("grid", ctypes.c_ubyte * len(IQ2_XXS_GRID)),
    )


def launch_moe_experts_tiles(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    chunks: tuple[Tensor, Tensor] | None,
    stacks: Sequence[StackPlanes],
    limit: float | None,
    workspace: tuple[Tensor, Tensor, Tensor],
    config: TilesConfig,
    *,
    num_sms: int,
    is_dependent: bool,
    addend: Tensor | None = None,
) -> None:
    """Enqueue; the op has checked and allocated.

    Args:
        out: (T, hidden) float, contiguous, written; T > 0.
        x: (T, hidden) bfloat16, contiguous.
        ids: (T, topk) int64, contiguous.
        weights: (T, topk) float32, contiguous.
        chunks: None where the kernel sorts the pairs; experts (chunks,) and pairs (chunks,
            config.columns) int64 of `make_tiles`.
        stacks: w1, w3 and w2 in layout TILES, the first two alike but for their numbers.
        limit: of the clamped SwiGLU; None for no clamp.
        workspace: (T * topk, inter) bfloat16, (T * topk, hidden) float32, and `num_tickets` int32
            zeros, which are zeros again afterwards.
        config: of `select_tiles`.
        num_sms: of the device.
        is_dependent: see `rtc.launch`. The kernel ahead, and those before it, may write x, ids,
            weights and addend.
        addend: (T, hidden) float32, contiguous, added to the sum of the slots; None for none.
    """
    gate, up, down = stacks
    shape = ExpertsShape(
        gate.q.shape[0], x.shape[1], workspace[0].shape[1], ids.shape[1], gate.kind, down.kind
    )
    totals = (total_code(gate), total_code(down))
    source = cuda_source(shape, config, out.dtype, totals, is_folded=chunks is None)
    kernel = rtc.load_kernel(source, x.device, smem_bytes(shape, config))
    lists = (None, None) if chunks is None else (chunks[0].data_ptr(), chunks[1].data_ptr())
    work = _Work(
        *(KernelStack.of(stack) for stack in (gate, up, down)),
        *(tensor.data_ptr() for tensor in (x, ids, weights)),
        *lists,
        *(
            workspace[0].data_ptr(),
            workspace[1].data_ptr(),
            out.data_ptr(),
            None if addend is None else addend.data_ptr(),
            workspace[2].data_ptr(),
        ),
        math.inf if limit is None else limit,
        x.shape[0],
        0 if chunks is None else chunks[0].shape[0],
        _GRID,
    )
    rtc.launch(
        kernel,
        1,
        32 * (config.warps + config.has_counter),
        [work],
        grid_y=num_sms * config.ctas,
        is_dependent=is_dependent,
        is_cooperative=True,
    )
