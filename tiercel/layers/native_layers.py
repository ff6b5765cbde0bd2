"""All layers of a dense decoder in one call of the native library, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.layers.decoder_layer import DecoderLayer
from tiercel.layers.linear import Linear
from tiercel.layers.norm import RMSNorm
from tiercel.ops.decoder_layers import (
    LayerParts,
    LayersShape,
    NativeLayers,
    NativeMatrix,
    decoder_layers,
    layer_attention,
    prepare_layers,
)


class NativeDecoderLayers:
    """Runs any step of a decoder whose matrices are native ones; see ops/decoder_layers.py."""

    def __init__(self, layers: Sequence[DecoderLayer], native: NativeLayers) -> None:
        self._layers = layers
        self._native = native

    def bind_cache(self) -> None:
        """Take the planes that the layers' attention was given."""
        attention = [layer.attention for layer in self._layers]
        self._native.bind_cache(
            [{"k": a.k_cache, "v": a.v_cache} for a in attention], [a.group for a in attention]
        )

    def __call__(self, x: Tensor, batch: Batch, pulse: Callable[[], None]) -> Tensor:
        """x: (T, hidden) float32, mutated. Returns it after the last layer."""
        return decoder_layers(x, self._native, batch, pulse)

    def attend(self, index: int, heads: Tensor, batch: Batch) -> Tensor:
        """The attention of one layer, for profiling.

        heads: (T, all heads, head_dim) float32, mutated. Returns (T, rows of q).
        """
        return layer_attention(heads, self._native, index, batch)


def make_native_layers(
    layers: Sequence[DecoderLayer], last_update_norm: RMSNorm | None, eps: float, *, rounds: bool
) -> NativeDecoderLayers | None:
    """Describe layers to the native library; None where a matrix is in no form of its own.

    Args:
        layers: of one decoder, in order.
        last_update_norm: of the update of the last one.
        eps: of all norms.
        rounds: whether inputs of products are rounded to 8 bits.
    """
    parts = [_parts(layer) for layer in layers]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    heads, mlp = layers[0].attention.shape, layers[0].mlp
    shape = LayersShape(
        hidden_size=mlp.down.weight.shape[0],
        intermediate_size=mlp.down.weight.shape[1],
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        activation=mlp.activation,
        eps=eps,
        scale=heads.scale,
        rounds=rounds,
    )
    last = None if last_update_norm is None else last_update_norm.weight
    return NativeDecoderLayers(layers, prepare_layers(known, shape, last))


def _parts(layer: DecoderLayer) -> LayerParts | None:
    attention, mlp = layer.attention, layer.mlp
    found = [
        _matrices(linear) for linear in (attention.qkv, attention.output, mlp.gate_up, mlp.down)
    ]
    qkv, output, gate_up, down = found
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    norms = attention.head_norms
    return LayerParts(
        attn_norm=layer.attn_norm.weight,
        attn_update_norm=layer.attn_norm.update_weight,
        mlp_norm=layer.mlp_norm.weight,
        mlp_update_norm=layer.mlp_norm.update_weight,
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        qkv_bias=_floats(attention.qkv.bias),
        output_bias=_floats(attention.output.bias),
        head_norms=None if norms is None else (norms.q, norms.k),
        rope=attention.rope_table,
        window=attention.shape.window,
    )


def _matrices(linear: Linear) -> tuple[NativeMatrix, ...] | None:
    found = tuple(part for part in linear.weight.segments if isinstance(part, NativeMatrix))
    return found if len(found) == len(linear.weight.segments) else None


def _floats(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.float32)
