"""All layers of a decoder as one kernel for steps of a few requests with one new token each.

The weights are those that serve all other steps; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tiercel.batch import Batch
from tiercel.layers.decoder_layer import DecoderLayer
from tiercel.ops.fused_batch_step import (
    BatchStepLayer,
    BatchStepWeights,
    Heads,
    Refusal,
    fused_batch_step,
    prepare_batch_step,
)
from tiercel.ops.fused_layer_tail import ChainWeights


class FusedBatchStep:
    """Runs one new token of each of a few requests; see ops/fused_batch_step.py."""

    def __init__(self, first: DecoderLayer, weights: BatchStepWeights) -> None:
        self.first = first
        self.weights = weights

    def supports(self, batch: Batch) -> bool:
        """Whether a batch has few requests, each with one new token, and no items to score."""
        is_short = batch.max_query_len == 1 and batch.num_tokens == batch.num_reqs
        most = self.weights.geometry.max_tokens
        return is_short and 1 <= batch.num_tokens <= most and batch.items is None

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x: (T, hidden) float32, mutated. Returns it, the residual after the last layer."""
        heads = self.first.attention.qkv(self.first.attn_norm(x))
        fused_batch_step(heads, x, self.weights, batch, self.first.attention.group)
        return x


def make_fused_batch_step(
    layers: Sequence[DecoderLayer], tails: Sequence[ChainWeights], num_sms: int
) -> FusedBatchStep | Refusal:
    """Bring the layers with their caches together, or say why they do not fit.

    Args:
        layers: all of a decoder, with their caches, full attention and one rotary table.
        tails: from each one's output projection to the next one's q, k and v.
        num_sms: of the GPU.
    """
    attention = layers[0].attention
    shape, norms = attention.shape, attention.head_norms
    heads = Heads(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rotary_dim=2 * attention.rope_table.shape[2],
        block_size=attention.k_cache.shape[1],
        has_norms=norms is not None,
    )
    if len({layer.attention.group for layer in layers}) > 1:
        return Refusal("layers have caches of different groups")
    parts = [
        BatchStepLayer(tail, layer.attention.k_cache, layer.attention.v_cache, _norms(layer))
        for layer, tail in zip(layers, tails, strict=True)
    ]
    weights = prepare_batch_step(
        parts,
        heads,
        attention.rope_table,
        num_sms,
        head_eps=0.0 if norms is None else norms.eps,
        scale=shape.scale,
    )
    return weights if isinstance(weights, Refusal) else FusedBatchStep(layers[0], weights)


def _norms(layer: DecoderLayer) -> tuple[Tensor, ...]:
    norms = layer.attention.head_norms
    return () if norms is None else (norms.q, norms.k)
