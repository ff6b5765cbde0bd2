"""All layers of a dense decoder for one new token of one request, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.errors import ArgumentError
from tiercel.kernels.fused import fused_decode_step as kernel
from tiercel.kernels.fused import fused_decode_step_stream
from tiercel.kernels.fused.fused_decode_step_geometry import (
    BLOCK_TOKENS,
    COLUMNS,
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MATRICES,
    TYPES,
)
from tiercel.kernels.fused.fused_decode_step_geometry import DecoderShape as DecoderShape
from tiercel.kernels.fused.fused_decode_step_geometry import partition as partition
from tiercel.kernels.fused.fused_decode_step_geometry import refuse_shape as refuse_shape
from tiercel.kernels.fused.fused_device import refuse_device as refuse_device
from tiercel.kernels.fused.fused_refusal import CTAS
from tiercel.kernels.fused.fused_refusal import Refusal as Refusal
from tiercel.ops.dequantize import dequantize
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType

_TYPES = tuple(QuantType[name] for name in TYPES)
_GROUP = 32  # activations with one scale


@dataclass(frozen=True, slots=True)
class FusedDecodeStepWeights:
    """The weights of all layers as `fused_decode_step` reads them.

    Attributes:
        stream: (CTAs, bytes) uint8, in the order of kernels/fused/fused_decode_step_stream.py.
        starts: where each group of warps begins in its rows.
        masks: of each layer, bit i set if matrix i is Q6_K, else Q4_K.
        norms: (2 * layers, hidden) float32, of attention and MLP in turn.
        head_norms: (layers, 2, head_dim) float32, of q and k; None without.
        rope: (positions, 2, head_dim / 2) float32, cos and sin.
        exchange: int32, through which activations travel.
        slices: of 4096 columns in a row of down.
        eps: of all norms.
        scale: of the scores.
    """

    stream: Tensor
    starts: tuple[int, ...]
    masks: tuple[int, ...]
    norms: Tensor
    head_norms: Tensor | None
    rope: Tensor
    exchange: Tensor
    slices: int
    eps: float
    scale: float


@dataclass(frozen=True, slots=True)
class FusedDecodeStepCaches:
    """Keys and values of all layers, (blocks, 64, kv_heads, head_dim) each, and their addresses."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    on_device: Any


class FusedDecodeStepBuilder:
    """Packs the weights of all layers, one layer at a time, so that memory holds no second copy."""

    def __init__(self, masks: Sequence[int], slices: int, device: torch.device) -> None:
        """Allocate.

        Args:
            masks: of each layer, bit i set if `MATRICES[i]` is Q6_K, else Q4_K.
            slices: intermediate_size / 4096, rounded up.
            device: of the result.
        """
        self.masks = tuple(masks)
        self.slices = slices
        num_bytes, self.starts = fused_decode_step_stream.stream_layout(masks, slices)
        shape = (CTAS, num_bytes)
        self.stream = torch.empty(shape, dtype=torch.uint8, device=device)

    def add(self, layer: int, matrices: Mapping[str, Sequence[QuantTensor]]) -> None:
        """Write a layer.

        Args:
            layer: its number.
            matrices: of each of `MATRICES` its parts in layout FILE: gate and up, else one.

        Raises:
            ArgumentError: a type is not that of the layer's mask.
        """
        places = fused_decode_step_stream.matrix_places(self.masks, self.slices, self.starts, layer)
        for i, name in enumerate(MATRICES):
            parts = matrices[name]
            expected = _TYPES[self.masks[layer] >> i & 1]
            if any(part.qtype is not expected for part in parts):
                raise ArgumentError(
                    f"fused_decode_step: {name} of layer {layer} is {parts[0].qtype.name}.",
                    hint=f"Its mask says {expected.name}.",
                )
            data = [part.planes["data"] for part in parts]
            rows = data[0] if len(data) == 1 else torch.stack(data, dim=1).flatten(0, 1)
            packed = fused_decode_step_stream.pack_matrix(name, self._filled(name, rows, expected))
            fused_decode_step_stream.write_matrix(self.stream, places[name], packed)

    def _filled(self, name: str, rows: Tensor, qtype: QuantType) -> Tensor:
        """Whole slices: blocks of zeros are weights of zero."""
        wide = self.slices * COLUMNS
        row_bytes = qtype.row_bytes(wide if name == "down" else COLUMNS)
        num_rows = 2 * wide if name == "gate_up" else rows.shape[0]
        missing = (0, row_bytes - rows.shape[1], 0, num_rows - rows.shape[0])
        return torch.nn.functional.pad(rows, missing) if any(missing) else rows

    def finish(
        self,
        norms: Sequence[Tensor],
        head_norms: Sequence[Tensor],
        rope: Tensor,
        *,
        eps: float,
        scale: float,
    ) -> FusedDecodeStepWeights:
        """Weights with everything else that a step reads; on a GPU the kernel is loaded.

        Args:
            norms: (hidden,) float32, of attention and MLP of each layer in turn.
            head_norms: (head_dim,) float32, of q and k of each layer in turn; none without.
            rope: see `FusedDecodeStepWeights`.
            eps: of all norms.
            scale: of the scores.
        """
        device = self.stream.device
        words = kernel.exchange_words(self.slices)
        weights = FusedDecodeStepWeights(
            self.stream,
            self.starts,
            self.masks,
            torch.stack(list(norms)),
            torch.stack(list(head_norms)).unflatten(0, (-1, 2)) if head_norms else None,
            rope,
            torch.empty(words, dtype=torch.int32, device=device),
            self.slices,
            eps,
            scale,
        )
        if device.type == "cuda":
            kernel.load_fused_decode_step(
                len(self.masks), self.slices, device, has_qk_norm=bool(head_norms)
            )
        return weights


def prepare_caches(k_caches: Sequence[Tensor], v_caches: Sequence[Tensor]) -> FusedDecodeStepCaches:
    """Describe the caches of all layers to the kernel.

    Args:
        k_caches: of each layer (blocks, 64, kv_heads, head_dim) float16 contiguous.
        v_caches: the same.

    Raises:
        ArgumentError: one has another shape or dtype.
    """
    tail = (BLOCK_TOKENS, KV_HEADS, HEAD)
    for plane in (*k_caches, *v_caches):
        is_right = tuple(plane.shape[1:]) == tail and plane.is_contiguous()
        if not is_right or plane.dtype != torch.float16:
            raise ArgumentError(
                f"fused_decode_step: a cache is {tuple(plane.shape)} {plane.dtype}.",
                hint=f"Pass contiguous (blocks, {', '.join(map(str, tail))}) float16.",
            )
    on_device = kernel.make_caches(k_caches, v_caches) if k_caches[0].is_cuda else None
    return FusedDecodeStepCaches(tuple(k_caches), tuple(v_caches), on_device)


def fused_decode_step(
    x: Tensor,
    weights: FusedDecodeStepWeights,
    caches: FusedDecodeStepCaches,
    batch: Batch,
    group: int = 0,
) -> Tensor:
    """Pass one token through all layers; its keys and values go to the cache.

    Inputs of matrices are rounded to 8 bits with one scale for 32, sums are exact within 32, then
    float32. Queries, keys, values and attention's weights are float16. The result has the same bits
    in every run, in a graph or outside; it is not that of the ops for more tokens. One launch at a
    time on a device: activations travel through `weights.exchange`.

    Args:
        x: (1, hidden) float32, the embedding of the token.
        weights: from `FusedDecodeStepBuilder`.
        caches: from `prepare_caches`.
        batch: one request with one token; lengths, blocks and slot are read on the device.
        group: the cache group of all layers.

    Returns:
        (1, hidden) float32, the residual before the last norm; NaN if a launch could not end.

    Raises:
        ArgumentError: x or the batch is another.
    """
    if x.shape != (1, HIDDEN) or x.dtype != torch.float32 or batch.num_tokens != 1:
        raise ArgumentError(
            f"fused_decode_step: x is {tuple(x.shape)} {x.dtype} for {batch.num_tokens} tokens.",
            hint=f"Pass one token: (1, {HIDDEN}) float32.",
        )
    if not x.is_cuda:
        return _fused_decode_step_torch(x[0], weights, caches, batch, group)[None]
    out = torch.empty_like(x)
    weights.exchange.fill_(kernel.EXCHANGE_EMPTY)
    args = kernel.make_args(
        x.contiguous(),
        out,
        weights.stream,
        weights.starts,
        weights.masks,
        weights.norms,
        weights.head_norms,
        weights.rope,
        weights.exchange,
        batch.positions,
        batch.seq_lens,
        batch.rows,
        batch.block_tables[group],
        batch.slot_mapping[group],
        eps=weights.eps,
        scale=weights.scale,
    )
    kernel.launch_fused_decode_step(
        args,
        caches.on_device,
        len(weights.masks),
        weights.slices,
        x.device,
        has_qk_norm=weights.head_norms is not None,
    )
    return out


# ---- on a CPU


def _rounded(x: Tensor) -> Tensor:
    """Each 32 neighbours to 8 bits and back."""
    groups = x.unflatten(0, (-1, _GROUP))
    scale = groups.abs().amax(dim=1, keepdim=True) / 127
    codes = torch.where(scale > 0, groups / scale, 0.0).round()
    flat: Tensor = (codes * scale).flatten()
    return flat


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * weight * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def _fused_decode_step_torch(
    x: Tensor,
    weights: FusedDecodeStepWeights,
    caches: FusedDecodeStepCaches,
    batch: Batch,
    group: int,
) -> Tensor:
    """The kernel's arithmetic, matrix by matrix."""
    tables = batch.block_tables[group, batch.rows[0]]
    length, slot = int(batch.seq_lens[0]), int(batch.slot_mapping[group, 0])
    tokens = torch.arange(length - 1)
    slots = tables[tokens // BLOCK_TOKENS].long() * BLOCK_TOKENS
    slots += tokens % BLOCK_TOKENS
    cos, sin = weights.rope[int(batch.positions[0])]
    for layer, mask in enumerate(weights.masks):
        places = fused_decode_step_stream.matrix_places(
            weights.masks, weights.slices, weights.starts, layer
        )

        def times(name: str, y: Tensor, mask: int = mask, places: Any = places) -> Tensor:
            is_q6 = bool(mask >> MATRICES.index(name) & 1)
            packed = fused_decode_step_stream.read_matrix(weights.stream, places[name], is_q6=is_q6)
            data = fused_decode_step_stream.unpack_matrix(name, packed)
            shape = (data.shape[0], y.shape[0])
            matrix = QuantTensor(_TYPES[is_q6], Layout.FILE, shape, {"data": data})
            return dequantize(matrix, torch.float32) @ _rounded(y)

        def turned(heads: Tensor, i: int, layer: int = layer) -> Tensor:
            if weights.head_norms is not None:
                heads = _norm(heads, weights.head_norms[layer, i], weights.eps)
            first, second = heads.chunk(2, dim=1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), 1).half()

        h = _norm(x, weights.norms[2 * layer], weights.eps)
        q, k, v = (times(name, h).unflatten(0, (-1, HEAD)) for name in MATRICES[:3])
        q, k, v = turned(q, 0), turned(k, 1), v.half()
        keys, values = (
            torch.cat((plane[layer].flatten(0, 1)[slots], new[None])).float()
            for plane, new in ((caches.k, k), (caches.v, v))
        )
        if slot >= 0:
            caches.k[layer].flatten(0, 1)[slot] = k
            caches.v[layer].flatten(0, 1)[slot] = v
        grouped = q.float().unflatten(0, (KV_HEADS, HEADS))
        scores = torch.einsum("ghd,tgd->ght", grouped, keys) * weights.scale
        o = torch.einsum("ght,tgd->ghd", scores.softmax(dim=2), values)
        x = x + times("o", o.flatten())
        h = _norm(x, weights.norms[2 * layer + 1], weights.eps)
        gate, up = times("gate_up", h).unflatten(0, (-1, 2)).unbind(1)
        x = x + times("down", torch.nn.functional.silu(gate) * up)
    return x
