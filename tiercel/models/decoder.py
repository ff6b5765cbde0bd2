"""The one decoder that runs every dense family: which layers does a token pass?

    x = embedding[token] * embedding_scale
    for each layer:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = head(norm(x))

What families do differently (`models/llama.py`, `qwen3.py`, `gemma3.py`) is data in `ModelConfig`:
norms of q and k heads, biases, sandwich norms, windows and rotary bases per layer. The residual x
is float32 throughout, because sums of Gemma's activations pass the range of float16; products take
`dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.cache.pool import CachePool
from tiercel.cache.spec import KVCacheSpec
from tiercel.env import has_fused_layer_tail, has_megakernel
from tiercel.layers.attention import Attention, AttentionShape, HeadNorms, PromptPlan
from tiercel.layers.embedding import Embedding
from tiercel.layers.fused_decode_step import FusedDecodeStep, StepLayer, make_fused_decode_step
from tiercel.layers.fused_layer_tail import ChainLayer, FusedLayerTail, make_fused_layer_tail
from tiercel.layers.linear import Linear
from tiercel.layers.mlp import GatedMLP
from tiercel.layers.norm import RMSNorm
from tiercel.models.config import ModelConfig
from tiercel.models.rope import rope_table
from tiercel.models.weights import WeightReader
from tiercel.ops.fused_decode_step import DecoderShape
from tiercel.ops.linear import linear, pick_rows, prepare_linear
from tiercel.ops.rms_norm import rms_norm
from tiercel.quant import take_rows


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP with their norms.

    What a part adds to the residual waits for the next norm, which adds it in the same pass; with
    sandwich norms (Gemma) it also norms it first.
    """

    attn_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(
        self, x: Tensor, update: Tensor | None, batch: Batch, plan: PromptPlan | None
    ) -> Tensor:
        """What waits to be added behind this layer, (T, hidden).

        Args:
            x: (T, hidden) float32, updated in place.
            update: (T, hidden), what waits before this layer; None before the first.
            batch: the step.
            plan: of the step, for this layer's shape and group.
        """
        update = self.attention(self.attn_norm(x, update), batch, plan)
        return self.mlp(self.mlp_norm(x, update))


class Decoder:
    """A dense decoder with its weights on one device.

    Attributes:
        pulse: called after each layer and each product of the head; does nothing unless replaced.
    """

    def __init__(
        self, config: ModelConfig, weights: WeightReader, dtype: torch.dtype, num_positions: int
    ) -> None:
        """Load the weights.

        Args:
            config: the shape, checked against the file already.
            weights: reads the file's tensors to the device.
            dtype: of products and of the cache.
            num_positions: positions that rotary tables cover (max_model_len).
        """
        self.config = config
        self.dtype = dtype
        self.pulse: Callable[[], None] = _unwatched
        builder = _LayerBuilder(config, weights, dtype, num_positions)
        self.embedding = Embedding(weights.stored("embed.weight"), config.embedding_scale)
        self.layers = [builder.layer(i) for i in range(config.num_layers)]
        self._samples = [self.layers[i] for i in builder.sample_layers()]
        self.last_update_norm = builder.last_update_norm()
        self.norm = builder.norm("norm")
        head = "head.weight" if weights.has("head.weight") else "embed.weight"
        wide = prepare_linear(
            [weights.file_tensor(head)],
            dtype,
            weights.device,
            wide=True,
            dense_copies=weights.dense_copies,
        )
        self.head = Linear(wide, out_dtype=torch.float32)
        # One kernel for a single token, where it fits.
        self.step: FusedDecodeStep | None = None
        if has_megakernel() and weights.dense_copies:
            self.step = builder.step(self.layers, num_positions)
        # From attention to attention in one kernel for a few tokens, where it fits.
        self.chain: FusedLayerTail | None = (
            builder.chain(self.layers) if has_fused_layer_tail() else None
        )
        self.draft_head = builder.draft_head(self) if config.num_mtp_layers else None

    @property
    def _cached_layers(self) -> list[DecoderLayer]:
        """All with a cache, that of the draft head last."""
        return self.layers + ([] if self.draft_head is None else [self.draft_head.layer])

    def cache_specs(self) -> list[KVCacheSpec]:
        """What each layer keeps, in layer order."""
        return [layer.attention.cache_spec(self.dtype) for layer in self._cached_layers]

    def bind_cache(self, pools: Sequence[CachePool]) -> None:
        """Give each layer its planes; a pool's place is that of its block tables."""
        for group, pool in enumerate(pools):
            for index, planes in pool.layers.items():
                self._cached_layers[index].attention.bind_cache(planes, group)
        if self.step is not None:  # all layers are in one group: full attention
            self.step.bind_cache([pools[0].layers[i] for i in range(len(self.layers))], 0)

    def forward(self, batch: Batch) -> Tensor:
        """Pass the new tokens through all layers.

        Returns:
            (T, hidden) float32, the residual before the last norm.
        """
        return self._pass(self.layers, batch)

    def forward_sample(self, batch: Batch) -> Tensor:
        """Launch what `forward` launches, each but once: one layer of every kind.

        For loading kernels and measuring memory; the result has the shape of `forward`'s alone.
        """
        return self._pass(self._samples, batch)

    def _pass(self, layers: Sequence[DecoderLayer], batch: Batch) -> Tensor:
        x, update = self.embedding(batch.input_ids), None
        if self.step is not None and self.step.takes(batch):
            return self.step(x, batch)
        if self.chain is not None and self.chain.takes(batch):
            return self.chain(x, batch)
        plans: dict[tuple[AttentionShape, int], PromptPlan | None] = {}
        for layer in layers:
            kind = (layer.attention.shape, layer.attention.group)
            if kind not in plans:
                plans[kind] = layer.attention.plan(batch)
            update = layer(x, update, batch, plans[kind])
            self.pulse()
        if update is None:
            return x
        if self.last_update_norm is not None:
            update = self.last_update_norm(update)
        return x.add_(update)

    def hidden_states(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Normed hidden states at some token places, as embedding models give them.

        Args:
            hidden: (T, hidden) from `forward`.
            rows: (L,) int32 token places.

        Returns:
            (L, hidden) float32.
        """
        norm = self.norm
        return rms_norm(take_rows(hidden, rows), norm.weight, norm.eps, torch.float32)

    def logits(
        self, hidden: Tensor, rows: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Logits at some token places.

        Args:
            hidden: (T, hidden) from `forward`.
            rows: (L,) int32 token places; None for all.
            out: (L, vocab_size) float32 for the result; None for a new tensor.

        Returns:
            (L, vocab_size) float32.
        """
        x = hidden if rows is None else take_rows(hidden, rows)
        return self._capped(self.head(self.norm(x), out))

    def token_logits(self, hidden: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
        """Logits of some tokens alone: their rows of the head are multiplied, the others not read.

        Args:
            hidden: (T, hidden) from `forward`.
            rows: (L,) int32 token places.
            token_ids: (K,) int64.

        Returns:
            (L, K) float32.
        """
        picked = pick_rows(self.head.weight, token_ids)
        if picked is None:
            return self.logits(hidden, rows).index_select(1, token_ids)
        x = self.norm(take_rows(hidden, rows))
        return self._capped(linear(x, picked, out_dtype=torch.float32))

    def _capped(self, logits: Tensor) -> Tensor:
        self.pulse()
        cap = self.config.logit_softcap
        return logits if cap == 0.0 else logits.div_(cap).tanh_().mul_(cap)


def _unwatched() -> None:
    """Do nothing."""


class MtpHead:
    """A layer that drafts: from a token's hidden state and the next token, the one after that.

        x = layer(proj([norm(embedding[next token]), norm(hidden)]))
        logits = head(norm(x))

    It has a cache of its own, at the same places, and shares the model's embedding and head.

    Source: "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2.
    """

    def __init__(
        self,
        model: Decoder,
        embed_norm: RMSNorm,
        hidden_norm: RMSNorm,
        proj: Linear,
        layer: DecoderLayer,
        norm: RMSNorm,
    ) -> None:
        self.layer = layer
        self._model = model
        self._embed_norm = embed_norm
        self._hidden_norm = hidden_norm
        self._proj = proj
        self._norm = norm

    def forward(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Pass some places through the layer.

        Args:
            batch: of the places p, with the tokens that stand at p + 1.
            hidden: (T, hidden) float32 at p, of the model's `forward` or of this one.

        Returns:
            (T, hidden) float32.
        """
        embedded = self._embed_norm(self._model.embedding(batch.input_ids))
        x = self._proj(torch.cat((embedded, self._hidden_norm(hidden)), dim=1)).float()
        return x.add_(self.layer(x, None, batch, self.layer.attention.plan(batch)))

    def logits(self, hidden: Tensor) -> Tensor:
        """(L, vocab_size) float32 of the tokens at p + 2, from (L, hidden) of `forward`."""
        return self._model.head(self._norm(hidden))


class _LayerBuilder:
    """Turns a file's tensors into layers."""

    def __init__(
        self, config: ModelConfig, weights: WeightReader, dtype: torch.dtype, num_positions: int
    ) -> None:
        self.config = config
        self.weights = weights
        self.dtype = dtype
        factors = weights.vector("rope_factors").cpu() if weights.has("rope_factors") else None
        self.rope = {"full": rope_table(config.rope, num_positions, factors).to(weights.device)}
        if config.rope_sliding is not None:
            self.rope["sliding"] = rope_table(config.rope_sliding, num_positions).to(weights.device)

    def sample_layers(self) -> list[int]:
        """The first layer, which adds nothing, and of the others the first of each kind.

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

    def norm(self, name: str, update_norm: str | None = None) -> RMSNorm:
        """The norm of a name; `update_norm` is the one that an update passes before it."""
        return RMSNorm(
            self.weights.norm_weight(f"{name}.weight"),
            self.config.norm_eps,
            self.dtype,
            self.sandwich_weight(update_norm),
        )

    def sandwich_weight(self, name: str | None) -> Tensor | None:
        """The weight of an output norm, if the model has them."""
        if name is None or not self.config.sandwich_norms:
            return None
        return self.weights.norm_weight(f"{name}.weight")

    def last_update_norm(self) -> RMSNorm | None:
        """The output norm of the last layer's MLP: float32, there is nothing to round it for."""
        weight = self.sandwich_weight(f"layers.{self.config.num_layers - 1}.post_mlp_norm")
        return None if weight is None else RMSNorm(weight, self.config.norm_eps, torch.float32)

    def head_norms(self, prefix: str) -> HeadNorms | None:
        """Norms of query and key heads, if the model has them."""
        if not self.config.qk_norm:
            return None
        q, k = (self.weights.norm_weight(f"{prefix}.{part}_norm.weight") for part in "qk")
        return HeadNorms(q, k, self.config.norm_eps)

    def linear(self, prefix: str, *parts: str) -> Linear:
        """One projection of parts that share their input, with biases if the file has them."""
        tensors = [self.weights.file_tensor(f"{prefix}.{part}.weight") for part in parts]
        weight = prepare_linear(
            tensors,
            self.dtype,
            self.weights.device,
            dense_copies=self.weights.dense_copies,
        )
        names = [f"{prefix}.{part}.bias" for part in parts]
        if not self.weights.has(names[0]):
            return Linear(weight)
        return Linear(
            weight, torch.cat([self.weights.vector(name) for name in names]).to(self.dtype)
        )

    def step(self, layers: Sequence[DecoderLayer], num_positions: int) -> FusedDecodeStep | None:
        """All layers as one kernel, if it fits them."""
        config = self.config
        shape = DecoderShape(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rope.rotary_dim,
            max_tokens=num_positions,
            is_plain=config.activation == "silu"
            and set(config.layer_types) == {"full"}
            and not (config.qkv_bias or config.sandwich_norms),
        )
        parts = []
        for layer in layers:
            norms = layer.attention.head_norms
            parts.append(
                StepLayer(
                    layer.attn_norm.weight,
                    () if norms is None else (norms.q, norms.k),
                    layer.attention,
                    layer.mlp_norm.weight,
                    layer.mlp,
                )
            )
        return make_fused_decode_step(parts, shape, config.norm_eps, self.weights.device)

    def chain(self, layers: Sequence[DecoderLayer]) -> FusedLayerTail | None:
        """From attention to attention as one kernel, if it fits them."""
        config = self.config
        is_plain = config.activation == "silu" and set(config.layer_types) == {"full"}
        if not is_plain or config.sandwich_norms or self.dtype != torch.float16:
            return None
        parts = [
            ChainLayer(layer.attn_norm, layer.attention, layer.mlp_norm, layer.mlp)
            for layer in layers
        ]
        return make_fused_layer_tail(parts, config.norm_eps, self.weights.device)

    def draft_head(self, model: Decoder) -> MtpHead:
        index = self.config.num_layers
        prefix = f"layers.{index}"
        return MtpHead(
            model,
            self.norm(f"{prefix}.mtp_embed_norm"),
            self.norm(f"{prefix}.mtp_hidden_norm"),
            self.linear(prefix, "mtp_proj"),
            self.layer(index),
            self.norm(f"{prefix}.mtp_norm"),
        )

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self.config, f"layers.{index}"
        kind = config.layer_types[index] if index < config.num_layers else "full"
        shape = AttentionShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.attention_scale,
            config.sliding_window if kind == "sliding" else 0,
        )
        attention = Attention(
            shape,
            self.linear(prefix, "q", "k", "v"),
            self.linear(prefix, "o"),
            self.rope[kind],
            self.head_norms(prefix),
        )
        mlp = GatedMLP(
            self.linear(prefix, "gate", "up"), self.linear(prefix, "down"), config.activation
        )
        before = f"layers.{index - 1}.post_mlp_norm" if index else None
        return DecoderLayer(
            self.norm(f"{prefix}.attn_norm", before),
            attention,
            self.norm(f"{prefix}.mlp_norm", f"{prefix}.post_attn_norm"),
            mlp,
        )
