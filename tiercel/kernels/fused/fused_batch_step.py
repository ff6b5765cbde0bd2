"""All layers of a dense decoder for up to 16 requests in one launch (cuda/fused_batch_step.cu).

Each request has one new token. It is `fused_layer_tail.py` with a loop over the layers and the
attention in front of each tail, so that no launch lies between layers. The launch is cooperative;
should a CTA come late all the same, the other CTAs stop waiting after seconds and the result is
NaN, never a hang.

Floor: the planes of all layers once, and the requests' keys and values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.kernels.fused.fused_batch_step_geometry import (
    HEAD_DIM,
    SPAN,
    BatchStepGeometry,
)
from tiercel.kernels.fused.fused_layer_tail import THREADS, tail_macros
from tiercel.kernels.fused.fused_layer_tail_geometry import COLUMN_BYTES, TILE
from tiercel.kernels.packed.packed_matvec import KernelPlanes
from tiercel.kernels.runtime import rtc

_LOG2_E = 1.4426950408889634
AHEAD = 1  # units of a warp in flight while its CTA attends: 37 KB an SM
_MOST_TOKENS = 16


class LayerRow(ctypes.Structure):
    """Layer of the source."""

    _fields_ = (
        ("planes", KernelPlanes * 5),
        *((name, ctypes.c_void_p) for name in ("mlp_norm", "next_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache")),
        ("sixes", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


class Args(ctypes.Structure):
    """Args of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "x", "heads")),
        *((name, ctypes.c_void_p) for name in ("exchange", "squares", "launches", "counters")),
        *((name, ctypes.c_void_p) for name in ("sent_heads", "sent_parts")),
        *((name, ctypes.c_void_p) for name in ("angles", "positions", "slots", "seq_lens")),
        *((name, ctypes.c_void_p) for name in ("rows", "tables")),
        *((name, ctypes.c_int) for name in ("table_width", "most_parts", "num_layers", "m")),
        *((name, ctypes.c_float) for name in ("eps", "head_eps", "scale_log2")),
    )


class LayerTensors(Struct, frozen=True):
    """What a layer reads and writes.

    Attributes:
        planes: of o, gate and up, down, and the next layer's q, k and v, in one or two matrices;
            empty for those that are not there.
        mlp_norm: (hidden,) float32.
        next_norm: (hidden,) float32, of the next layer's attention.
        head_norms: (128,) float32 of heads of q and k, or none.
        k_cache: (blocks, block_size, kv_heads, 128) float16.
        v_cache: like k_cache.
    """

    planes: tuple[tuple[Tensor, ...], ...]
    mlp_norm: Tensor
    next_norm: Tensor
    head_norms: tuple[Tensor, ...]
    k_cache: Tensor
    v_cache: Tensor


def exchange_bytes(geometry: BatchStepGeometry) -> int:
    """Of the buffer that activations travel through."""
    return geometry.columns * COLUMN_BYTES * 2


def heads_bytes(geometry: BatchStepGeometry) -> int:
    """Of the words that q, k and v travel in: four elements in 16 bytes."""
    return _MOST_TOKENS * geometry.tail.shape.heads_width * 4


def most_parts(max_keys: int) -> int:
    """Of a request's attention."""
    return -(-max_keys // SPAN)


def parts_bytes(geometry: BatchStepGeometry, max_keys: int) -> int:
    """Of the words that sums of parts travel in: two numbers in 16 bytes."""
    return _MOST_TOKENS * geometry.heads.num_heads * most_parts(max_keys) * HEAD_DIM * 8


def smem_bytes(tokens: int, geometry: BatchStepGeometry) -> int:
    """Shared memory of a CTA."""
    return geometry.smem_bytes(-(-tokens // 8))


def cuda_source(tokens: int, geometry: BatchStepGeometry) -> rtc.KernelSource:
    """The kernel for a number of tokens."""
    heads = geometry.heads
    macros = (
        *tail_macros(tokens, geometry.tail),
        ("IS_STEP", 1),
        ("SIXES", geometry.always_six),
        ("MAYBE_SIXES", geometry.maybe_six),
        ("KV_HEADS", heads.num_kv_heads),
        ("HAS_NORMS", int(heads.has_norms)),
        ("BLOCK_SIZE", heads.block_size),
        ("SPAN", SPAN),
        ("AHEAD", AHEAD),
    )
    return rtc.KernelSource("fused_batch_step", macros)


def make_table(geometry: BatchStepGeometry, layers: Sequence[LayerTensors]) -> Tensor:
    """Rows of all layers, on their device. It holds addresses: the tensors must outlive it."""
    rows = (LayerRow * len(layers))()
    for row, layer, sixes in zip(rows, layers, geometry.sixes, strict=True):
        for i, planes in enumerate(layer.planes):
            row.planes[i] = KernelPlanes.of(planes)
        if len(layer.planes) == 4:  # q, k and v in one: v begins further on in each plane
            row.planes[4] = _planes_of_v(layer.planes[3], geometry)
        row.mlp_norm, row.next_norm = layer.mlp_norm.data_ptr(), layer.next_norm.data_ptr()
        if layer.head_norms:
            row.q_norm, row.k_norm = (norm.data_ptr() for norm in layer.head_norms)
        row.k_cache, row.v_cache = layer.k_cache.data_ptr(), layer.v_cache.data_ptr()
        row.sixes = sixes & geometry.maybe_six
    host = torch.frombuffer(bytearray(rows), dtype=torch.uint8)
    return host.to(layers[0].mlp_norm.device)


def _planes_of_v(planes: Sequence[Tensor], geometry: BatchStepGeometry) -> KernelPlanes:
    shape = geometry.tail.shape
    parts = []
    for plane in planes:
        assert plane.is_contiguous(), "tiles of 16 rows follow each other"
        first = plane.nbytes // shape.heads_width * shape.qk_rows
        assert first % TILE == 0, "whole tiles"
        parts.append(plane.flatten().view(torch.uint8)[first:])
    return KernelPlanes.of(parts)


def make_args(
    x: Tensor,
    heads: Tensor,
    table: Tensor,
    exchange: Sequence[Tensor],
    angles: Tensor,
    positions: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    rows: Tensor,
    tables: Tensor,
    *,
    num_layers: int,
    eps: float,
    head_eps: float,
    scale: float,
) -> Args:
    """Args of the source. It holds addresses alone: the tensors must outlive the launch.

    Args:
        x: (tokens, hidden) float32, the residual, updated in place.
        heads: (tokens, heads_width) float16, q, k and v of the first layer.
        table: from `make_table`.
        exchange: (`exchange_bytes`,) uint8; (2, groups, 2, 8) int32; (2, ctas) int32 and
            (columns, 2) int32; (`heads_bytes`,) and (`parts_bytes`,) uint8. All but the first are
            zeros before the first launch.
        angles: (positions, 2, 64) float32, contiguous: cos, then sin.
        positions: (tokens,) int32.
        slots: (tokens,) int64; negative writes nothing.
        seq_lens: (tokens,) int32, with the new token.
        rows: (tokens,) int32, of tables.
        tables: (requests, blocks) int32, contiguous.
        num_layers: of the table.
        eps: of the norms of layers.
        head_eps: of the norms of heads.
        scale: of scores.
    """
    return Args(
        *(tensor.data_ptr() for tensor in (table, x, heads, *exchange)),
        *(tensor.data_ptr() for tensor in (angles, positions, slots, seq_lens, rows, tables)),
        tables.shape[1],
        most_parts(angles.shape[0]),
        num_layers,
        x.shape[0],
        eps,
        head_eps,
        scale * _LOG2_E,
    )


def load_fused_batch_step(geometry: BatchStepGeometry, device: torch.device) -> None:
    """Compile and load what `launch_fused_batch_step` launches."""
    sources = {
        cuda_source(tokens, geometry): smem_bytes(tokens, geometry)
        for tokens in range(8, geometry.max_tokens + 1, 8)
    }
    rtc.load_kernels(sources, device)


def launch_fused_batch_step(args: Args, geometry: BatchStepGeometry, device: torch.device) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        args: from `make_args`.
        geometry: of the decoder.
        device: of all tensors.
    """
    smem = smem_bytes(args.m, geometry)
    kernel = rtc.load_kernel(cuda_source(args.m, geometry), device, smem)
    rtc.launch(kernel, geometry.tail.ctas, THREADS, [args], is_cooperative=True)
