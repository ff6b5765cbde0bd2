"""What profiling may time of a dense decoder: its products and its attention, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.layers.attention import Attention
from tiercel.layers.decoder_layer import DecoderLayer
from tiercel.layers.head import Head
from tiercel.layers.linear import Linear
from tiercel.layers.native_layers import NativeDecoderLayers
from tiercel.models.model import TimedAttention, TimedProduct
from tiercel.ops.decoder_layers import NativeMatrix
from tiercel.ops.linear_group import Q8Planes
from tiercel.ops.packed_matvec import PackedWeight
from tiercel.quant import QuantTensor


def dense_products(layers: Sequence[DecoderLayer], head: Head) -> list[TimedProduct]:
    """The matrix products of all layers and the head, by kind."""
    kinds: dict[str, Sequence[Linear | Head]] = {
        "q, k, v": [layer.attention.qkv for layer in layers],
        "o": [layer.attention.output for layer in layers],
        "gate, up": [layer.mlp.gate_up for layer in layers],
        "down": [layer.mlp.down for layer in layers],
        "head": [head],
    }
    return [
        TimedProduct(
            name, linears[0].weight.shape, tuple(linears), sum(map(_weight_bytes, linears))
        )
        for name, linears in kinds.items()
    ]


def _weight_bytes(linear: Linear | Head) -> int:
    total = 0
    for segment in linear.weight.segments:
        if isinstance(segment, PackedWeight):
            total += segment.tensor.nbytes
        elif isinstance(segment, Tensor | QuantTensor | NativeMatrix | Q8Planes):
            total += segment.nbytes
        else:
            total += segment.packed.nbytes + segment.scale_zero.nbytes
    return total


def dense_attention(
    layers: Sequence[DecoderLayer], native: NativeDecoderLayers | None, batch: Batch
) -> list[TimedAttention]:
    """The attention of each kind of layer, on random queries, keys and values.

    Args:
        layers: of the decoder.
        native: the same layers where the native library runs them: its attention is timed, with
            norms, rotation and new keys and values.
        batch: equal requests, each with its new tokens at the end of its context.
    """
    kinds: dict[object, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault((layer.attention.shape, layer.attention.group), []).append(index)
    return [
        _time_kind([layers[index].attention for index in own], native, own, batch)
        for own in kinds.values()
    ]


def _time_kind(
    layers: Sequence[Attention],
    native: NativeDecoderLayers | None,
    indices: Sequence[int],
    batch: Batch,
) -> TimedAttention:
    shape, cache = layers[0].shape, layers[0].k_cache
    heads = torch.randn(
        (batch.num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim),
        device=cache.device,
    )
    if native is None:
        heads, plan = heads.to(cache.dtype), layers[0].plan(batch)
        calls = [partial(layer.attend, heads, batch, plan) for layer in layers]
    else:
        calls = [partial(native.attend, index, heads, batch) for index in indices]
    context, queries = batch.max_seq_len, batch.max_query_len
    window = shape.window or context
    seen = [min(window, index + 1) for index in range(context - queries, context)]
    keys = min(context, window + queries - 1)
    width = shape.num_heads * shape.head_dim
    kept = 2 * batch.num_reqs * keys * shape.num_kv_heads * shape.head_dim * cache.itemsize
    return TimedAttention(
        f"attention {shape.num_heads}/{shape.num_kv_heads} x {shape.head_dim}"
        + (f", window {shape.window}" if shape.window else ""),
        tuple(calls),
        cache_bytes=kept,
        num_bytes=kept + 2 * batch.num_tokens * width * heads.itemsize,
        flops=4 * width * batch.num_reqs * sum(seen),
    )
