"""Loads a dense decoder: from the tensors of a file to layers, norms, head and fused kernels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from tiercel.env import has_one_copy
from tiercel.layers.attention import Attention, AttentionShape, HeadNorms
from tiercel.layers.decoder_layer import DecoderLayer
from tiercel.layers.embedding import Embedding
from tiercel.layers.fused_decode_step import FusedDecodeStep, StepLayer, make_fused_decode_step
from tiercel.layers.fused_layer_tail import FusedLayerTail, make_fused_layer_tail
from tiercel.layers.head import Head
from tiercel.layers.linear import Linear
from tiercel.layers.mlp import GatedMLP
from tiercel.layers.native_layers import NativeDecoderLayers, make_native_layers
from tiercel.layers.norm import RMSNorm
from tiercel.models.config import ModelConfig
from tiercel.models.fused_paths import (
    USED,
    decoder_shape,
    log_fused_paths,
    step_geometry,
    switched_off,
    unsupported_part,
)
from tiercel.models.mtp import MtpHead
from tiercel.models.rope import rope_table
from tiercel.models.weights import WeightReader
from tiercel.ops.fused_decode_step import (
    FusedDecodeStepBuilder,
    Refusal,
    make_one_copy,
    refuse_device,
)
from tiercel.ops.linear import prepare_linear, rounds_activations
from tiercel.parallel import SINGLE, Group

_LOG: Final = logging.getLogger(__name__)


class DecoderBuilder:
    """Turns a file's tensors, or a rank's parts of them, into the parts of a decoder."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        dtype: torch.dtype,
        num_positions: int,
        group: Group = SINGLE,
    ) -> None:
        """Make what layers share; the arguments are those of `Decoder`."""
        self.config = config
        self.group = group
        self.weights = weights
        self.dtype = dtype
        self.num_positions = num_positions
        factors = weights.vector("rope_factors").cpu() if weights.has("rope_factors") else None
        self.step = self._one_copy(num_positions)
        self.rope = {"full": rope_table(config.rope, num_positions, factors).to(weights.device)}
        if config.rope_sliding is not None:
            self.rope["sliding"] = rope_table(config.rope_sliding, num_positions).to(weights.device)

    def _one_copy(self, num_positions: int) -> FusedDecodeStepBuilder | None:
        """Where all packed weights of the layers rest, if one copy serves every kernel."""
        device = self.weights.device
        if not has_one_copy() or device.type != "cuda":
            return None
        refusal = refuse_device(device)
        if self.group.size > 1:
            refusal = Refusal(f"{self.group.size} GPUs share the model")
        elif self.dtype != torch.float16:
            refusal = Refusal(f"dtype is {self.dtype}, not float16".replace("torch.", ""))
        made = refusal or make_one_copy(step_geometry(self.weights.source, num_positions), device)
        if isinstance(made, FusedDecodeStepBuilder):
            return made
        _LOG.info("TIERCEL_ONE_COPY: not used: %s", made.reason)
        return None

    def sample_layers(self) -> list[int]:
        """Indices of the first layer, which adds no update, and of one layer of each later kind.

        Layers of a kind have matrices of the same types and shapes, and the same attention.
        """
        source = self.weights.source
        found: dict[tuple[object, ...], int] = {}
        for index in range(self.config.num_layers):
            prefix = f"layers.{index}."
            own = {
                name.removeprefix(prefix): (
                    source.tensors[stored].qtype,
                    source.tensors[stored].shape,
                )
                for name, stored in source.names.items()
                if name.startswith(prefix)
            }
            kind = (index == 0, self.config.layer_types[index], *sorted(own.items()))
            found.setdefault(kind, index)
        return list(found.values())

    def norm(self, name: str, update_norm: str | None = None, group: Group = SINGLE) -> RMSNorm:
        """The norm of a name.

        Args:
            name: of the norm.
            update_norm: name of the norm that its update passes first.
            group: ranks whose updates are parts.
        """
        return RMSNorm(
            self.weights.norm_weight(f"{name}.weight"),
            self.config.norm_eps,
            self.dtype,
            self.sandwich_weight(update_norm),
            group,
        )

    @property
    def update_group(self) -> Group:
        """Ranks whose parts of updates are added by norms; products with a bias add them before."""
        has_bias = any(self.weights.has(f"layers.0.{part}.bias") for part in ("o", "down"))
        return SINGLE if has_bias else self.group

    def sandwich_weight(self, name: str | None) -> Tensor | None:
        """The weight of an output norm, if the model has them."""
        if name is None or not self.config.sandwich_norms:
            return None
        return self.weights.norm_weight(f"{name}.weight")

    def last_update_norm(self) -> RMSNorm | None:
        """The output norm of the last layer's MLP, in float32: no product follows it."""
        weight = self.sandwich_weight(f"layers.{self.config.num_layers - 1}.post_mlp_norm")
        return None if weight is None else RMSNorm(weight, self.config.norm_eps, torch.float32)

    def head_norms(self, prefix: str) -> HeadNorms | None:
        """Norms of query and key heads, if the model has them."""
        if not self.config.qk_norm:
            return None
        q, k = (self.weights.norm_weight(f"{prefix}.{part}_norm.weight") for part in "qk")
        return HeadNorms(q, k, self.config.norm_eps)

    def linear(self, prefix: str, *parts: str, group: Group = SINGLE) -> Linear:
        """One projection of parts that share their input, with biases if the file has them.

        group: ranks that have other columns of them, and of the input.
        """
        tensors = [self.weights.file_tensor(f"{prefix}.{part}.weight") for part in parts]
        index = int(prefix.rpartition(".")[2])
        resting = None
        if self.step is not None and index < self.config.num_layers:  # no draft head's
            resting = self.step.rest(index, dict(zip(parts, tensors, strict=True)))
        weight = prepare_linear(
            tensors,
            self.dtype,
            self.weights.device,
            dense_copies=self.weights.dense_copies,
            resting=resting,
        )
        names = [f"{prefix}.{part}.bias" for part in parts]
        if not self.weights.has(names[0]):
            return Linear(weight, group=group)
        bias = torch.cat([self.weights.vector(name) for name in names]).to(self.dtype)
        return Linear(weight, bias, group=group)

    def fused_step(
        self,
        layers: Sequence[DecoderLayer],
        last_update_norm: RMSNorm | None = None,
        resting: FusedDecodeStepBuilder | None = None,
    ) -> FusedDecodeStep | Refusal:
        """Layers as one kernel, all or that of the draft head, or why it does not fit them.

        Args:
            layers: of the decoder, or the draft head's.
            last_update_norm: after the last layer's MLP, if there is one.
            resting: where the layers' weights are, if that is their only copy.
        """
        switch = switched_off().get("fused_decode_step")
        if switch is not None:
            return switch
        is_copied = self.weights.device.type == "cuda" and resting is None
        has_room = self.weights.step_copy or not is_copied
        sliding = tuple(layer.attention.shape.window > 0 for layer in layers)
        shape = replace(
            decoder_shape(self.config, self.num_positions, self.weights.sharding),
            num_layers=len(layers),
            sliding=sliding,
        )
        parts = []
        outputs = [layer.attn_norm.update_weight for layer in layers[1:]]
        outputs.append(None if last_update_norm is None else last_update_norm.weight)
        for layer, mlp_output in zip(layers, outputs, strict=True):
            norms = layer.attention.head_norms
            update_norms = (layer.mlp_norm.update_weight, mlp_output)
            parts.append(
                StepLayer(
                    layer.attn_norm.weight,
                    () if norms is None else (norms.q, norms.k),
                    layer.attention,
                    layer.mlp_norm.weight,
                    layer.mlp,
                    tuple(weight for weight in update_norms if weight is not None),
                )
            )
        return make_fused_decode_step(
            parts,
            shape,
            self.config.norm_eps,
            self.weights.device,
            resting,
            self.group,
            None if has_room else Refusal("there is no memory for a second copy of the weights"),
        )

    def fused_tail(self, layers: Sequence[DecoderLayer]) -> FusedLayerTail | Refusal:
        """From attention to attention as one kernel, or why it does not fit them."""
        switch = switched_off().get("fused_layer_tail")
        if switch is not None:
            return switch
        part = unsupported_part(self.config)
        if part:
            return Refusal(part)
        if self.dtype != torch.float16:
            return Refusal(f"dtype is {self.dtype}, not float16".replace("torch.", ""))
        device = self.weights.device
        return make_fused_layer_tail(layers, self.config.norm_eps, device, self.group)

    def native_layers(
        self, layers: Sequence[DecoderLayer], last_update_norm: RMSNorm | None = None
    ) -> NativeDecoderLayers | None:
        """Layers as one call of the native library.

        None without it, on a GPU, or where several processes share the model.
        """
        if self.group.size > 1:
            return None
        return make_native_layers(
            layers,
            last_update_norm,
            self.config.norm_eps,
            rounds=rounds_activations(self.dtype),
        )

    def embedding(self) -> Embedding:
        """The table of token embeddings, in its stored type."""
        first_id, _ = self.weights.sharding.vocab_part(self.config.vocab_size)
        table = self.weights.stored("embed.weight")
        return Embedding(table, self.config.embedding_scale, self.group, first_id)

    def head(self) -> Head:
        """The output matrix; models without one of their own share the embedding's."""
        weights = self.weights
        head = "head.weight" if weights.has("head.weight") else "embed.weight"
        wide = prepare_linear(
            [weights.file_tensor(head)],
            self.dtype,
            weights.device,
            wide=True,
            dense_copies=weights.dense_copies,
        )
        own = Linear(wide, out_dtype=torch.float32)
        return Head(own, self.config.vocab_size, self.group)

    def draft_head(self, embedding: Embedding, head: Head) -> MtpHead:
        """The layer that drafts, around the model's embedding and head."""
        index = self.config.num_layers
        prefix = f"layers.{index}"
        layer = self.layer(index)
        step = self.fused_step([layer])
        outcome = step.reason if isinstance(step, Refusal) else USED
        is_gpu = self.weights.device.type == "cuda"
        log_fused_paths({"fused_decode_step of the draft head": outcome}, is_gpu=is_gpu)
        draft_head = MtpHead(
            embedding,
            head,
            self.norm(f"{prefix}.mtp_embed_norm"),
            self.norm(f"{prefix}.mtp_hidden_norm"),
            self.linear(prefix, "mtp_proj"),
            layer,
            self.norm(f"{prefix}.mtp_norm"),
            self.native_layers([layer]),
        )
        draft_head.fused_layer = None if isinstance(step, Refusal) else step
        return draft_head

    def layer(self, index: int) -> DecoderLayer:
        """A layer by its number; that of the draft head follows the last one."""
        config, prefix = self.config, f"layers.{index}"
        kind = config.layer_types[index] if index < config.num_layers else "full"
        first_kv_head, last_kv_head = self.weights.sharding.kv_part(config.num_kv_heads)
        shape = AttentionShape(
            config.num_heads // self.group.size,
            last_kv_head - first_kv_head,
            config.head_dim,
            config.attention_scale,
            config.sliding_window if kind == "sliding" else 0,
        )
        updates = self.update_group
        products = self.group if updates.size == 1 else SINGLE
        attention = Attention(
            shape,
            self.linear(prefix, "q", "k", "v"),
            self.linear(prefix, "o", group=products),
            self.rope[kind],
            self.head_norms(prefix),
        )
        mlp = GatedMLP(
            self.linear(prefix, "gate", "up"),
            self.linear(prefix, "down", group=products),
            config.activation,
        )
        before = f"layers.{index - 1}.post_mlp_norm" if index else None
        return DecoderLayer(
            self.norm(f"{prefix}.attn_norm", before, updates),
            attention,
            self.norm(f"{prefix}.mlp_norm", f"{prefix}.post_attn_norm", updates),
            mlp,
            updates,
        )
