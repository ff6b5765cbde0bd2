"""All layers of a dense decoder for one new token, or two, in one launch.

The source is cuda/fused/fused_decode_step.cu.

128 CTAs hold a whole SM each and hand activations to each other through memory: 6 exchanges a
layer. They must run side by side, so the launch is cooperative: the driver refuses it where they
cannot, and starts none before all can. Should a CTA come late all the same, the other CTAs stop
waiting after seconds and the result is NaN, never a hang.

Where several GPUs share a model, a launch on each does the same with its heads, its columns of o
and of down and the rows that make their inputs, and they exchange sums through memory that all of
them map: no launch and no barrier more. All ranks make the same launches in the same order; one
waits for another for minutes.

Floor: the weights' bytes and the cached keys and values once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tiercel.kernels.collectives.symmetric_memory import SymmetricMemory
from tiercel.kernels.fused.fused_decode_step_geometry import (
    BLOCK_TOKENS,
    GROUP_WARPS,
    GROUPS,
    PHASES,
    RECORD,
    TILE_KEYS,
    TYPES,
    DecoderShape,
    StepGeometry,
)
from tiercel.kernels.fused.fused_refusal import CTAS, SMEM_BYTES
from tiercel.kernels.runtime import rtc

THREADS = 640
EXCHANGE_EMPTY = -1  # the value of exchange words before a launch
LOG2_E = 1.4426950408889634
_WORD_BYTES = 8  # of an output of o or down, with the count of layers


def exchange_words(geometry: StepGeometry) -> int:
    """32-bit words that activations of a token travel through; their order is in the source."""
    shape = geometry.shape
    inputs = 2 * shape.hidden_size + shape.q_size + shape.intermediate_size
    partials = shape.q_size // RECORD * geometry.splits * 9
    words = 4 * (3 * inputs // RECORD + partials) + shape.q_size + 2 * shape.kv_size
    return words + (2 * shape.hidden_size // RECORD if shape.has_update_norms else 0)


def peer_bytes(shape: DecoderShape) -> int:
    """Of each rank's memory for sums of all ranks: cuda/fused_decode_step_ranks.cuh."""
    return 2 * shape.hidden_size * shape.ranks * _WORD_BYTES


def cuda_source(
    geometry: StepGeometry, *, has_qk_norm: bool, has_bias: bool = False, tokens: int = 1
) -> rtc.KernelSource:
    """The kernel of a model's shape for steps of some tokens, at most MOST_STEP_TOKENS."""
    shape = geometry.shape
    macros = [
        ("TOKENS", tokens),
        ("LAYERS", shape.num_layers),
        ("HIDDEN", shape.hidden_size),
        ("INNER", shape.intermediate_size),
        ("HAS_QK_NORM", int(has_qk_norm)),
        ("HAS_BIAS", int(has_bias)),
        ("HAS_UPDATE_NORMS", int(shape.has_update_norms)),
        ("IS_GELU", int(shape.activation == "gelu_tanh")),
        ("TYPES", sum(1 << TYPES.index(name) for name in geometry.types)),
        ("IS_BF16", 0),
        ("CTAS", CTAS),
        ("GROUPS", GROUPS),
        ("GROUP_WARPS", GROUP_WARPS),
        ("HEAD", shape.head_dim),
        ("HEADS", geometry.heads),
        ("KV_HEADS", shape.num_kv_heads),
        ("SHARERS", geometry.sharers),
        ("SPLITS", geometry.splits),
        ("TILE", TILE_KEYS),
        ("PAGE", BLOCK_TOKENS),
        ("MOST_TILES", geometry.most_tiles),
        ("WINDOW", shape.window),
        ("SLIDING_TILES", geometry.sliding_tiles),
        ("GATEUP_PARTS", geometry.most_pairs),
        ("RANKS", shape.ranks),
    ]
    for phase, plan in zip(PHASES, geometry.plans, strict=True):
        name = phase.upper().replace("_", "")
        macros += [(f"{name}_ACROSS", plan.across), (f"{name}_TILE", plan.tile)]
    macros.append(("DOWN_TIMES", geometry.plan("down").times))
    return rtc.KernelSource("fused_decode_step", tuple(macros))


def shares_table(geometry: StepGeometry) -> list[list[int]]:
    """Of each CTA, how many groups of 32 pairs it has, and which; filled up with zeros."""
    most = geometry.most_pairs
    return [[len(own), *own, *[0] * (most - len(own))] for own in geometry.pairs]


@functools.cache
def _structures(
    num_layers: int, ranks: int = 1, tokens: int = 1
) -> tuple[type[ctypes.Structure], type[ctypes.Structure]]:
    """Args and Caches of the source."""
    args = [
        *((name, ctypes.c_void_p) for name in ("stream", "starts", "shares", "norms")),
        *((name, ctypes.c_void_p) for name in ("head_norms", "bias", "rope", "rope_sliding")),
        *((name, ctypes.c_void_p) for name in ("x_in", "x_out", "exchange")),
        *((name, ctypes.c_void_p) for name in ("position", "seq_len", "row")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "tables_sliding")),
        *((name, ctypes.c_void_p) for name in ("slot", "slot_sliding")),
        ("max_blocks", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("score_scale", ctypes.c_float),
        ("types", ctypes.c_uint32 * num_layers),
    ]
    if tokens > 1:
        args.append(("requests", ctypes.c_int))
    if ranks > 1:
        args += [("tp_rank", ctypes.c_int), ("peers", ctypes.c_void_p * ranks)]
        args.append(("passed", ctypes.c_void_p))
    caches = [
        ("maps", rtc.TensorMap * (2 * num_layers)),
        ("planes", ctypes.c_void_p * (-(-2 * num_layers // 8) * 8)),  # to whole 64 bytes
    ]
    return (
        type("Args", (ctypes.Structure,), {"_fields_": args}),
        type("Caches", (ctypes.Structure,), {"_fields_": caches}),
    )


def load_fused_decode_step(
    geometry: StepGeometry,
    device: torch.device,
    *,
    has_qk_norm: bool,
    has_bias: bool,
    tokens: int = 1,
) -> None:
    """Compile and load what `launch_fused_decode_step` launches for a number of tokens."""
    source = cuda_source(geometry, has_qk_norm=has_qk_norm, has_bias=has_bias, tokens=tokens)
    rtc.load_kernel(source, device, SMEM_BYTES)


def make_caches(k_caches: Sequence[Tensor], v_caches: Sequence[Tensor]) -> Any:
    """Tensor maps and addresses of the caches of all layers, see `launch_fused_decode_step`."""
    caches = _structures(len(k_caches))[1]()
    for layer, planes in enumerate(zip(k_caches, v_caches, strict=True)):
        for i, plane in enumerate(planes):
            blocks, tokens, heads, width = plane.shape
            caches.maps[2 * layer + i] = rtc.make_tensor_map(
                plane, (width, heads, blocks * tokens), (width, width * heads), (64, 1, TILE_KEYS)
            )
            caches.planes[2 * layer + i] = plane.data_ptr()
    return caches


def make_args(
    x: Tensor,
    out: Tensor,
    stream: Tensor,
    starts: Tensor,
    shares: Tensor,
    geometry: StepGeometry,
    norms: Tensor,
    head_norms: Tensor | None,
    bias: Tensor | None,
    ropes: tuple[Tensor, Tensor],
    exchange: Tensor,
    position: Tensor,
    seq_len: Tensor,
    row: Tensor,
    block_tables: tuple[Tensor, Tensor],
    slots: tuple[Tensor, Tensor],
    *,
    eps: float,
    scale: float,
    memory: SymmetricMemory | None = None,
    passed: Tensor | None = None,
) -> Any:
    """Args of the source. It holds addresses alone: the tensors must outlive the launch.

    Args:
        x: (T, hidden) float32, of one token or two.
        out: (T, hidden) float32.
        stream: (bytes,) uint8, see `fused_decode_step_stream`.
        starts: (CTAS, GROUPS) int64, where each group begins in it.
        shares: (CTAS, 1 + most pairs) int32, `shares_table`.
        geometry: of the decoder.
        norms: (2 * layers, hidden) float32, attention and MLP in turn; with norms of updates 4 a
            layer, those of both last.
        head_norms: (layers, 2, head_dim) float32, q and k; None for a model without.
        bias: (layers, rows of q, k and v) float32; None for a model without.
        ropes: (positions, 2, head_dim / 2) float32, of full layers and of sliding ones.
        exchange: (T * `exchange_words`,) int32, filled with `EXCHANGE_EMPTY` on this stream.
        position: (T,) int32.
        seq_len: (R,) int32, with the new tokens, at most MOST_TOKENS. One request has all of them,
            or each has one.
        row: (R,) int32, of block_tables.
        block_tables: (rows, blocks) int32, of both.
        slots: (T,) int64 of the new tokens, of both; negative writes nothing.
        eps: of all norms.
        scale: of the scores.
        memory: `peer_bytes` of every rank, zeros before the first launch; None for one GPU.
        passed: (CTAS,) int32, as `memory` zeros before the first launch; None for one GPU.
    """
    num_layers = len(geometry.masks)
    sliding = geometry.shape.sliding or (False,) * num_layers
    types = [mask | int(slides) << 18 for mask, slides in zip(geometry.masks, sliding, strict=True)]
    assert block_tables[0].shape == block_tables[1].shape, "of one batch"
    tokens, requests = x.shape[0], seq_len.shape[0]
    ranks: tuple[Any, ...] = ()
    if memory is not None and passed is not None:
        addresses = (ctypes.c_void_p * len(memory.addresses))(*memory.addresses)
        ranks = (memory.rank, addresses, passed.data_ptr())
    return _structures(num_layers, geometry.shape.ranks, tokens)[0](
        *(tensor.data_ptr() for tensor in (stream, starts, shares, norms)),
        *(0 if tensor is None else tensor.data_ptr() for tensor in (head_norms, bias)),
        *(tensor.data_ptr() for tensor in (*ropes, x, out, exchange, position, seq_len, row)),
        *(tensor.data_ptr() for tensor in (*block_tables, *slots)),
        block_tables[0].shape[1],
        eps,
        scale * LOG2_E,
        (ctypes.c_uint32 * num_layers)(*types),
        *((requests,) if tokens > 1 else ()),
        *ranks,
    )


def launch_fused_decode_step(
    args: Any,
    caches: Any,
    geometry: StepGeometry,
    device: torch.device,
    *,
    has_qk_norm: bool,
    has_bias: bool,
    tokens: int = 1,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        args: from `make_args`.
        caches: from `make_caches` of planes (blocks, BLOCK_TOKENS, kv_heads, head_dim) float16.
        geometry: of the decoder.
        device: of all tensors.
        has_qk_norm: whether q and k have norms.
        has_bias: whether q, k and v have biases.
        tokens: of `args`.
    """
    source = cuda_source(geometry, has_qk_norm=has_qk_norm, has_bias=has_bias, tokens=tokens)
    kernel = rtc.load_kernel(source, device, SMEM_BYTES)
    rtc.launch(kernel, CTAS, THREADS, [args, caches], is_cooperative=True)
