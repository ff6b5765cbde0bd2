"""From one attention to the next in one launch, for up to 16 tokens (cuda/fused_layer_tail.cu).

The output projection, gate and up, down and the next layer's q, k, v, with residual, norms and
SwiGLU between them. CTAs in clusters of two hold a whole SM each and hand activations to each
other through memory; `fused_layer_tail_geometry.py` has the widths that fit. They must run side
by side, so the launch is cooperative; it may be dependent too (the driver takes both). Should a CTA
come late all the same, the other CTAs stop waiting after seconds and the result is NaN, never a
hang.

Where several GPUs share a model, a launch on each does the same with its columns of o and of down,
and they exchange sums through memory that all of them map: no launch and no barrier more.

Floor: the planes of four matrices once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tiercel.kernels.collectives.symmetric_memory import SymmetricMemory
from tiercel.kernels.fused.fused_layer_tail_geometry import COLUMN_BYTES, GROUP, TILE, Geometry
from tiercel.kernels.packed.packed_matvec import KernelPlanes
from tiercel.kernels.runtime import rtc

THREADS = 640
_PART_BYTES = 2048  # of a rank's sums of 32 rows and 8 tokens, with epochs


def exchange_bytes(geometry: Geometry) -> int:
    """Of the buffer that activations travel through."""
    return geometry.columns * COLUMN_BYTES * 2


def peer_bytes(hidden: int, ranks: int) -> int:
    """Of each rank's memory for sums of all ranks: cuda/fused_layer_tail_ranks.cuh."""
    return 2 * (hidden // GROUP) * 2 * ranks * _PART_BYTES


def smem_bytes(tokens: int, geometry: Geometry) -> int:
    """Shared memory of a CTA.

    Less than an SM has. Each CTA takes 1 KiB of an SM besides, so beside one of 227 KiB no CTA of
    the next kernel could wait, not even one without shared memory. In the memory left over CTAs of
    rotary_kv_write wait, which saves 23 us of 2,743 with 16 requests (H200,
    results/step_variants_h200.json).
    """
    return geometry.smem_bytes(-(-tokens // 8))


@functools.cache
def cuda_source(tokens: int, geometry: Geometry) -> rtc.KernelSource:
    """The kernel for a number of tokens."""
    types = geometry.types
    macros = (
        *tail_macros(tokens, geometry),
        ("SIX_O", int(types.o)),
        ("SIX_GU", int(types.gate_up)),
        ("SIX_DOWN", int(types.down)),
        ("SIX_QK", int(types.qk)),
        ("SIX_V", int(types.v)),
        ("IS_STEP", 0),
    )
    return rtc.KernelSource("fused_layer_tail", macros)


def tail_macros(tokens: int, geometry: Geometry) -> tuple[tuple[str, int], ...]:
    """Sizes that fused_layer_tail and fused_batch_step have in common."""
    tiles = -(-tokens // 8)
    ring, shape, types = geometry.ring(tiles), geometry.shape, geometry.types
    return (
        ("CTAS", geometry.ctas),
        ("HIDDEN", shape.hidden),
        ("ATTENDED", shape.attended),
        ("INNER", shape.inner),
        ("QK_TILES", shape.qk_rows // TILE),
        ("QKV_TILES", shape.heads_width // TILE),
        ("TOKENS", 8 * tiles),
        ("ANY_SIX", int(types.any_six)),
        ("STAGES", ring.stages),
        ("XSLOTS", ring.slots),
        ("BUFFERS", ring.buffers),
        ("MEANS", 32),
        ("IN_FILE", 0),
        ("IN_STEP", int(types.in_step)),
        ("RANKS", geometry.ranks),
    )


@functools.cache
def _args_type(ranks: int) -> type[ctypes.Structure]:
    """Args of the source."""
    fields = (
        ("planes", KernelPlanes * 5),
        *((name, ctypes.c_void_p) for name in ("attended", "x", "heads", "mlp_norm", "next_norm")),
        *((name, ctypes.c_void_p) for name in ("exchange", "squares", "launches", "counters")),
        ("m", ctypes.c_int),
        ("eps", ctypes.c_float),
    )
    peers = (("tp_rank", ctypes.c_int), ("peers", ctypes.c_void_p * ranks))
    return type("Args", (ctypes.Structure,), {"_fields_": fields + (peers if ranks > 1 else ())})


def load_fused_layer_tail(geometry: Geometry, device: torch.device) -> None:
    """Compile and load what `launch_fused_layer_tail` launches."""
    sources = {
        cuda_source(tokens, geometry): smem_bytes(tokens, geometry)
        for tokens in range(8, geometry.max_tokens + 1, 8)
    }
    rtc.load_kernels(sources, device)


def make_args(
    attended: Tensor,
    x: Tensor,
    heads: Tensor | None,
    planes: Sequence[Sequence[Tensor]],
    mlp_norm: Tensor,
    next_norm: Tensor,
    exchange: Tensor,
    squares: Tensor,
    launches: Tensor,
    counters: Tensor,
    eps: float,
    memory: SymmetricMemory | None = None,
) -> Any:
    """Args of the source. It holds addresses alone: the tensors must outlive the launch.

    Args:
        attended: (tokens, attended) float16, outputs of the attention.
        x: (tokens, hidden) float32, the residual, updated in place.
        heads: (tokens, heads_width) float16, q, k, v of the next layer; None after the last.
        planes: of o, gate and up, down, q and k (and v, if of the same type), v.
        mlp_norm: (hidden,) float32.
        next_norm: (hidden,) float32, of the next layer's attention.
        exchange: (`exchange_bytes`,) uint8.
        squares: (2, groups, 2, 8) int32, zeros before the first launch.
        launches: (2, ctas) int32, as the next zeros before the first launch.
        counters: (columns, 2) int32, for layers of so many columns alone.
        eps: of the norms.
        memory: `peer_bytes` of every rank, zeros before the first launch; None for one GPU.
    """
    peers: tuple[Any, ...] = ()
    if memory is not None:
        addresses = (ctypes.c_void_p * len(memory.addresses))(*memory.addresses)
        peers = (memory.rank, addresses)
    return _args_type(1 if memory is None else len(memory.addresses))(
        (KernelPlanes * len(planes))(*map(KernelPlanes.of, planes)),
        attended.data_ptr(),
        x.data_ptr(),
        None if heads is None else heads.data_ptr(),
        *(tensor.data_ptr() for tensor in (mlp_norm, next_norm, exchange, squares)),
        *(tensor.data_ptr() for tensor in (launches, counters)),
        x.shape[0],
        eps,
        *peers,
    )


def launch_fused_layer_tail(
    args: Any, tokens: int, geometry: Geometry, device: torch.device, *, is_dependent: bool
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        args: from `make_args`.
        tokens: rows of x.
        geometry: of the matrices.
        device: of all tensors.
        is_dependent: see `rtc.launch`.
    """
    kernel = rtc.load_kernel(cuda_source(tokens, geometry), device, smem_bytes(tokens, geometry))
    rtc.launch(
        kernel, geometry.ctas, THREADS, [args], is_dependent=is_dependent, is_cooperative=True
    )
