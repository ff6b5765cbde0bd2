"""All layers of a dense decoder for one new token in one launch (cuda/fused_decode_step.cu).

128 CTAs hold a whole SM each and hand activations to each other through memory: 6 exchanges a
layer. They must run side by side, so the launch is cooperative: the driver refuses it where they
cannot, and starts none before all can. Should a CTA come late all the same, the other CTAs stop
waiting after seconds and the result is NaN, never a hang.

Floor: the weights' bytes and the cached keys and values once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tiercel.kernels.fused.fused_decode_step_geometry import (
    BLOCK_TOKENS,
    GROUPS,
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MOST_TILES,
    SPLITS,
    TILE_KEYS,
)
from tiercel.kernels.fused.fused_decode_step_stream import GROUP_WARPS
from tiercel.kernels.fused.fused_refusal import CTAS, SMEM_BYTES
from tiercel.kernels.runtime import rtc

THREADS = 640
EXCHANGE_EMPTY = -1  # the value of exchange words before a launch
LOG2_E = 1.4426950408889634


def exchange_words(slices: int) -> int:
    """32-bit words that activations travel through; their order is in the source."""
    vectors = 3 * CTAS * (3 + slices) + 12 * CTAS + CTAS * SPLITS * 9
    return 4 * vectors


def cuda_source(num_layers: int, slices: int, *, has_qk_norm: bool) -> rtc.KernelSource:
    """The kernel of a model's shape."""
    macros = (
        ("LAYERS", num_layers),
        ("SLICES", slices),
        ("HAS_QK_NORM", int(has_qk_norm)),
        ("IS_BF16", 0),
        ("CTAS", CTAS),
        ("GROUPS", GROUPS),
        ("GROUP_WARPS", GROUP_WARPS),
        ("HIDDEN", HIDDEN),
        ("HEAD", HEAD),
        ("HEADS", HEADS),
        ("KV_HEADS", KV_HEADS),
        ("SPLITS", SPLITS),
        ("TILE", TILE_KEYS),
        ("PAGE", BLOCK_TOKENS),
        ("MOST_TILES", MOST_TILES),
    )
    return rtc.KernelSource("fused_decode_step", macros)


@functools.cache
def _structures(num_layers: int) -> tuple[type[ctypes.Structure], type[ctypes.Structure]]:
    """Args and Caches of the source."""
    args = [
        ("stream", ctypes.c_void_p),
        ("stream_bytes", ctypes.c_uint64),
        ("group_at", ctypes.c_uint64 * GROUPS),
        *((name, ctypes.c_void_p) for name in ("norms", "head_norms", "rope", "x_in", "x_out")),
        ("exchange", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("position", "seq_len", "row", "block_tables")),
        ("slot", ctypes.c_void_p),
        ("max_blocks", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("score_scale", ctypes.c_float),
        ("six", ctypes.c_uint8 * num_layers),
    ]
    caches = [
        ("maps", rtc.TensorMap * (2 * num_layers)),
        ("planes", ctypes.c_void_p * (-(-2 * num_layers // 8) * 8)),  # to whole 64 bytes
    ]
    return (
        type("Args", (ctypes.Structure,), {"_fields_": args}),
        type("Caches", (ctypes.Structure,), {"_fields_": caches}),
    )


def load_fused_decode_step(
    num_layers: int, slices: int, device: torch.device, *, has_qk_norm: bool
) -> None:
    """Compile and load what `launch_fused_decode_step` launches."""
    rtc.load_kernel(cuda_source(num_layers, slices, has_qk_norm=has_qk_norm), device, SMEM_BYTES)


def make_caches(k_caches: Sequence[Tensor], v_caches: Sequence[Tensor]) -> Any:
    """Tensor maps and addresses of the caches of all layers, see `launch_fused_decode_step`."""
    caches = _structures(len(k_caches))[1]()
    for layer, planes in enumerate(zip(k_caches, v_caches, strict=True)):
        for i, plane in enumerate(planes):
            num_tokens = plane.shape[0] * plane.shape[1]
            caches.maps[2 * layer + i] = rtc.make_tensor_map(
                plane, (HEAD, KV_HEADS, num_tokens), (HEAD, HEAD * KV_HEADS), (64, 1, TILE_KEYS)
            )
            caches.planes[2 * layer + i] = plane.data_ptr()
    return caches


def make_args(
    x: Tensor,
    out: Tensor,
    stream: Tensor,
    group_at: Sequence[int],
    masks: Sequence[int],
    norms: Tensor,
    head_norms: Tensor | None,
    rope: Tensor,
    exchange: Tensor,
    position: Tensor,
    seq_len: Tensor,
    row: Tensor,
    block_tables: Tensor,
    slot: Tensor,
    *,
    eps: float,
    scale: float,
) -> Any:
    """Args of the source. It holds addresses alone: the tensors must outlive the launch.

    Args:
        x: (1, HIDDEN) float32.
        out: (1, HIDDEN) float32.
        stream: (CTAS, bytes) uint8, see `fused_decode_step_stream`.
        group_at: where each group begins in a row of it.
        masks: of each layer, the matrices that are Q6_K.
        norms: (2 * layers, HIDDEN) float32, attention and MLP in turn.
        head_norms: (layers, 2, HEAD) float32, q and k; None for a model without.
        rope: (positions, 2, HEAD / 2) float32.
        exchange: (`exchange_words`,) int32, filled with `EXCHANGE_EMPTY` on this stream.
        position: (1,) int32.
        seq_len: (1,) int32, with the new token, at most MOST_TOKENS.
        row: (1,) int32, of block_tables.
        block_tables: (rows, blocks) int32.
        slot: (1,) int64 of the new token; negative writes nothing.
        eps: of all norms.
        scale: of the scores.
    """
    num_layers = len(masks)
    return _structures(num_layers)[0](
        stream.data_ptr(),
        stream.shape[1],
        (ctypes.c_uint64 * GROUPS)(*group_at),
        norms.data_ptr(),
        0 if head_norms is None else head_norms.data_ptr(),
        *(tensor.data_ptr() for tensor in (rope, x, out, exchange, position, seq_len, row)),
        block_tables.data_ptr(),
        slot.data_ptr(),
        block_tables.shape[1],
        eps,
        scale * LOG2_E,
        (ctypes.c_uint8 * num_layers)(*masks),
    )


def launch_fused_decode_step(
    args: Any,
    caches: Any,
    num_layers: int,
    slices: int,
    device: torch.device,
    *,
    has_qk_norm: bool,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        args: from `make_args`.
        caches: from `make_caches` of planes (blocks, BLOCK_TOKENS, KV_HEADS, HEAD) float16.
        num_layers: of both.
        slices: of 4096 columns in a row of down.
        device: of all tensors.
        has_qk_norm: whether q and k have norms.
    """
    source = cuda_source(num_layers, slices, has_qk_norm=has_qk_norm)
    kernel = rtc.load_kernel(source, device, SMEM_BYTES)
    rtc.launch(kernel, CTAS, THREADS, [args, caches], is_cooperative=True)
