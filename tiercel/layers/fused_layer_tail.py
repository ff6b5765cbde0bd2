"""Layers of a decoder from attention to attention, for steps of a few tokens.

The weights are those that serve all other steps; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.env import has_dependent_launch
from tiercel.layers.decoder_layer import DecoderLayer
from tiercel.layers.fused_batch_step import FusedBatchStep, make_fused_batch_step
from tiercel.layers.linear import Linear
from tiercel.ops.fused_layer_tail import (
    ChainExchange,
    ChainWeights,
    Refusal,
    fused_layer_tail,
    make_exchange,
    prepare_fused_layer_tail,
    refuse_device,
    refuse_sharing,
    refuse_width,
    share_memory,
)
from tiercel.ops.packed_matvec import PackedWeight
from tiercel.parallel import SINGLE, Group


class FusedLayerTail:
    """Runs all layers of a step of a few tokens; see ops/fused_layer_tail.py."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        weights: Sequence[ChainWeights],
        exchange: ChainExchange,
        *,
        is_dependent: bool,
    ) -> None:
        self.layers = layers
        self.weights = weights
        self.exchange = exchange
        self.is_dependent = is_dependent
        self.max_tokens = min(part.geometry.max_tokens for part in weights)
        self.step: FusedBatchStep | None = None  # set by bind_cache

    def bind_cache(self) -> Refusal | None:
        """Make one kernel of all layers, which have their caches; None, or why there is none."""
        device = self.layers[0].attention.k_cache.device
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        made = make_fused_batch_step(self.layers, self.weights, num_sms)
        if isinstance(made, Refusal):
            return made
        self.step = made
        return None

    def supports(self, batch: Batch) -> bool:
        """Whether a batch has few enough tokens, and no items to score."""
        return 1 <= batch.num_tokens <= self.max_tokens and batch.items is None

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x: (T, hidden) float32, mutated. Returns it, the residual after the last layer."""
        if self.step is not None and self.step.supports(batch):
            return self.step(x, batch)
        first = self.layers[0]
        plan = first.attention.plan(batch)
        heads: Tensor | None = first.attention.qkv(first.attn_norm(x))
        for layer, weights in zip(self.layers, self.weights, strict=True):
            assert heads is not None, "only the last layer has no next one"
            attended = layer.attention.rope_and_attend(heads, batch, plan)
            heads = fused_layer_tail(
                attended, x, weights, self.exchange, is_dependent=self.is_dependent
            )
        return x


def make_fused_layer_tail(
    layers: Sequence[DecoderLayer], eps: float, device: torch.device, group: Group = SINGLE
) -> FusedLayerTail | Refusal:
    """Bring the layers' weights together, or say why device, shapes or types do not fit.

    Args:
        layers: all of a decoder, with SiLU, no windows and no output norms.
        eps: of all norms.
        device: where the weights are.
        group: ranks that share the model; all of them call it.
    """
    hidden = layers[0].mlp_norm.weight.shape[0]
    has_memory = group.small_sums is not None
    refusal = refuse_width(hidden) or refuse_device(device)
    refusal = refusal or refuse_sharing(group.size, has_memory=has_memory)
    if refusal is not None:  # the same on all ranks
        return refusal
    weights = _bring_together(layers, eps, device, group.size)
    memory = None
    if group.processes is not None:
        # Ranks may have parts of other widths; all go one way, or sums would wait for ever.
        refusal = weights if isinstance(weights, Refusal) else None
        shared = share_memory(hidden, group.processes, device, refusal)
        if isinstance(shared, Refusal):
            return shared
        memory = shared
    if isinstance(weights, Refusal):
        return weights
    exchange = make_exchange(weights[0].geometry, device, memory)
    return FusedLayerTail(layers, weights, exchange, is_dependent=has_dependent_launch())


def _bring_together(
    layers: Sequence[DecoderLayer], eps: float, device: torch.device, ranks: int
) -> list[ChainWeights] | Refusal:
    """The weights of all launches, or why some do not fit."""
    weights: list[ChainWeights] = []
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    for index, (layer, following) in enumerate(zip(layers, [*layers[1:], None], strict=True)):
        linears = [layer.attention.output, layer.mlp.gate_up, layer.mlp.down]
        linears += [] if following is None else [following.attention.qkv]
        segments = [_packed(linear) for linear in linears]
        known = [parts for parts in segments if parts is not None]
        if len(known) < len(linears):
            return Refusal(f"a matrix after the attention of layer {index} is not packed")
        o, gate_up, down = known[:3]
        part = prepare_fused_layer_tail(
            o,
            gate_up,
            down,
            () if following is None else known[3],
            layer.mlp_norm.weight,
            layer.mlp_norm.weight if following is None else following.attn_norm.weight,
            eps,
            num_sms,
            ranks,
        )
        if isinstance(part, Refusal):
            return Refusal(f"{part.reason} (after the attention of layer {index})")
        weights.append(part)
    return weights


def _packed(linear: Linear) -> list[PackedWeight] | None:
    """A matrix's segments; None if one is not packed, or it has a bias."""
    segments = linear.weight.segments
    packed = [segment for segment in segments if isinstance(segment, PackedWeight)]
    return packed if linear.bias is None and len(packed) == len(segments) else None
