"""The one decoder that runs every dense family: which layers does a token pass?

    x = embedding[token] * embedding_scale
    for each layer:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = head(norm(x))

What families do differently (`models/llama.py`, `qwen3.py`, `gemma3.py`) is data in `ModelConfig`:
norms of q and k heads, biases, sandwich norms, windows and rotary bases per layer. The residual x
is float32 throughout, because sums of Gemma's activations pass the range of float16; products take
`dtype`. `decoder_build.py` loads the parts, `mtp.py` has the head that drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from tiercel.batch import Batch, BatchLengths
from tiercel.cache.pool import CachePool
from tiercel.cache.spec import KVCacheSpec
from tiercel.config import ModelOptions
from tiercel.env import has_batch_step
from tiercel.errors import ArgumentError
from tiercel.layers.attention import Attention, AttentionShape, PromptPlan
from tiercel.layers.decoder_layer import DecoderLayer
from tiercel.layers.fused_decode_step import FusedDecodeStep
from tiercel.layers.fused_layer_tail import FusedLayerTail
from tiercel.layers.native_layers import NativeDecoderLayers
from tiercel.models.config import ModelConfig
from tiercel.models.decoder_build import DecoderBuilder
from tiercel.models.decoder_timing import dense_attention, dense_products
from tiercel.models.fused_paths import FUSED_PATHS, USED, log_fused_paths
from tiercel.models.model import TimedAttention, TimedProduct
from tiercel.models.weights import WeightReader
from tiercel.ops.fused_decode_step import Refusal
from tiercel.ops.packed_gemm import TokenImage
from tiercel.ops.prefill_attention_plan import PlannedTiles
from tiercel.ops.rms_norm import rms_norm
from tiercel.parallel import SINGLE, Group
from tiercel.quant import take_rows


class Decoder:
    """A dense decoder with its weights on one device; the methods are those of `Model`.

    Attributes:
        pulse: called after each layer and each product of the head; does nothing unless replaced.
        fused_paths: of `models.fused_paths.FUSED_PATHS`, "used" or why not.
    """

    block_size: ClassVar[int] = 64
    state_dtype: ClassVar[torch.dtype] = torch.float32
    packs_items: ClassVar[bool] = True
    exact_tokens: ClassVar[int | None] = None

    @staticmethod
    def check_options(config: ModelConfig, options: ModelOptions) -> None:
        """Refuse other forms of the cache and of products than those of the dtype.

        Raises:
            ArgumentError: names the option.
        """
        if options.kv_dtype != "auto":
            raise ArgumentError(
                f"kv_dtype={options.kv_dtype!r}: a {config.arch} model keeps keys and values in "
                "its dtype.",
                hint="Use auto.",
            )
        if options.numerics != "exact":
            raise ArgumentError(
                f"numerics={options.numerics!r}: a {config.arch} model has no other products than "
                "those of its dtype.",
                hint="Use exact.",
            )

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        dtype: torch.dtype,
        num_positions: int,
        options: ModelOptions,
        group: Group = SINGLE,
    ) -> None:
        """Load the weights.

        Args:
            config: the shape, checked against the file already.
            weights: reads the file's tensors to the device.
            dtype: of products and of the cache.
            num_positions: positions that rotary tables cover (max_model_len).
            options: the defaults; see `check_options`.
            group: the ranks that share the model, as `weights.sharding` says.
        """
        self.check_options(config, options)
        self.config = config
        self.dtype = dtype
        self.pulse: Callable[[], None] = _do_nothing
        builder = DecoderBuilder(config, weights, dtype, num_positions, group)
        self.embedding = builder.embedding()
        self.layers = [builder.layer(i) for i in range(config.num_layers)]
        for layer, following in pairwise(self.layers):
            layer.load_before(following)
        self._samples = [self.layers[i] for i in builder.sample_layers()]
        # Layers of one shape share their plans.
        self._planners: dict[AttentionShape, Attention] = {}
        for layer in self.layers:
            self._planners.setdefault(layer.attention.shape, layer.attention)
        self.last_update_norm = builder.last_update_norm()
        self.norm = builder.norm("norm")
        self.head = builder.head()
        # One kernel for a single token, or two, where it fits.
        step = builder.fused_step(self.layers, self.last_update_norm, builder.step)
        self.fused_decode_step: FusedDecodeStep | None = None if isinstance(step, Refusal) else step
        # From attention to attention in one kernel for a few tokens, where it fits.
        chain = builder.fused_tail(self.layers)
        self.fused_layer_tail: FusedLayerTail | None = None if isinstance(chain, Refusal) else chain
        self.fused_paths = {
            name: made.reason if isinstance(made, Refusal) else USED
            for name, made in zip(FUSED_PATHS, (step, chain), strict=True)
        }
        is_gpu = weights.device.type == "cuda"
        log_fused_paths(self.fused_paths, is_gpu=is_gpu)
        if self.fused_decode_step is not None:
            no_pairs = self.fused_decode_step.no_pairs
            outcome = USED if no_pairs is None else no_pairs.reason
            log_fused_paths({"fused_decode_step of two tokens": outcome}, is_gpu=is_gpu)
        # All layers as one call of the native library, on a CPU that has it.
        self.native_layers: NativeDecoderLayers | None = builder.native_layers(
            self.layers, self.last_update_norm
        )
        self.draft_head = (
            builder.draft_head(self.embedding, self.head) if config.num_mtp_layers else None
        )

    @property
    def state_width(self) -> int:
        """Elements of a token's state: the residual's."""
        return self.config.hidden_size

    @property
    def weights_per_layer(self) -> int:
        """Weights that a token is multiplied with in one layer."""
        config = self.config
        heads = config.num_heads + config.num_kv_heads
        return config.hidden_size * (2 * heads * config.head_dim + 3 * config.intermediate_size)

    @property
    def _cached_layers(self) -> list[DecoderLayer]:
        """All layers with a cache, that of the draft head last."""
        return self.layers + ([] if self.draft_head is None else [self.draft_head.layer])

    def cache_specs(self) -> list[KVCacheSpec]:
        """What each layer keeps, in layer order."""
        return [layer.attention.cache_spec(self.dtype) for layer in self._cached_layers]

    def bind_cache(self, pools: Sequence[CachePool]) -> None:
        """Give each layer its planes; a pool's index is that of its block tables."""
        found: dict[int, tuple[dict[str, Tensor], int]] = {}
        for group, pool in enumerate(pools):
            for index, planes in pool.layers.items():
                self._cached_layers[index].attention.bind_cache(planes, group)
                found[index] = planes, group
        if self.fused_decode_step is not None:
            own = [found[index] for index in range(len(self.layers))]
            planes_of, groups = zip(*own, strict=True)
            self.fused_decode_step.bind_cache(planes_of, groups)
        if self.fused_layer_tail is not None and has_batch_step():
            refusal = self.fused_layer_tail.bind_cache()
            outcome = USED if refusal is None else refusal.reason
            log_fused_paths({"fused_batch_step": outcome}, is_gpu=True)
        if self.native_layers is not None:
            self.native_layers.bind_cache()
        if self.draft_head is not None:
            self.draft_head.bind_cache(*found[len(self.layers)])

    def plan(self, lengths: BatchLengths) -> dict[AttentionShape, PlannedTiles]:
        """Tiles of prefill attention, by the shape of the layers that share them."""
        return {
            shape: attention.tiles(lengths.query_lens, lengths.context_lens, lengths.items)
            for shape, attention in self._planners.items()
        }

    def forward(self, batch: Batch) -> Tensor:
        """Pass the new tokens through all layers.

        Returns:
            (T, hidden) float32, the residual before the last norm.
        """
        return self._pass(self.layers, batch)

    def forward_sample(self, batch: Batch) -> Tensor:
        """Launch what `forward` launches, each kernel once: one layer of every kind.

        For loading kernels and measuring memory; only the shape of the result is that of `forward`.
        """
        return self._pass(self._samples, batch)

    def _pass(self, layers: Sequence[DecoderLayer], batch: Batch) -> Tensor:
        x = self.embedding(batch.input_ids)
        update: Tensor | TokenImage | None = None
        if self.fused_decode_step is not None and self.fused_decode_step.supports(batch):
            return self.fused_decode_step(x, batch)
        if self.fused_layer_tail is not None and self.fused_layer_tail.supports(batch):
            return self.fused_layer_tail(x, batch)
        if self.native_layers is not None:
            return self.native_layers(x, batch, self.pulse)
        plans: dict[tuple[AttentionShape, int], PromptPlan | None] = {}
        followings = [*layers[1:], None]
        for layer, following in zip(layers, followings, strict=True):
            kind = (layer.attention.shape, layer.attention.group)
            if kind not in plans:
                plans[kind] = layer.attention.plan(batch)
            update = layer(x, update, batch, plans[kind], following)
            self.pulse()
        if update is None:
            return x
        assert isinstance(update, Tensor), "no layer follows the last one"
        update = layers[-1].whole(update)
        if self.last_update_norm is not None:
            update = self.last_update_norm(update)
        return x.add_(update)

    def hidden_states(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Normed hidden states of some tokens, as embedding models give them.

        Args:
            hidden: (T, hidden) from `forward`.
            rows: (L,) int32 indices of tokens.

        Returns:
            (L, hidden) float32.
        """
        norm = self.norm
        return rms_norm(take_rows(hidden, rows), norm.weight, norm.eps, torch.float32)

    def logits(
        self, hidden: Tensor, rows: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Logits of some tokens.

        Args:
            hidden: (T, hidden) from `forward`.
            rows: (L,) int32 indices of tokens; None for all.
            out: (L, vocab_size) float32 for the result; None for a new tensor.

        Returns:
            (L, vocab_size) float32.
        """
        x = hidden if rows is None else take_rows(hidden, rows)
        return self._capped(self.head(self.norm(x), out))

    def token_logits(self, hidden: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
        """Logits of some token ids alone: only their rows of the head are read and multiplied.

        Args:
            hidden: (T, hidden) from `forward`.
            rows: (L,) int32 indices of tokens.
            token_ids: (K,) int64.

        Returns:
            (L, K) float32.
        """
        logits = self.head.token_logits(self.norm(take_rows(hidden, rows)), token_ids)
        if logits is None:
            return self.logits(hidden, rows).index_select(1, token_ids)
        return self._capped(logits)

    def best_tokens(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The largest logits and their token ids; see `Model`."""
        logits, token_ids = self.head.best(self.norm(hidden), count)
        return self._capped(logits), token_ids

    def _capped(self, logits: Tensor) -> Tensor:
        self.pulse()
        cap = self.config.logit_softcap
        return logits if cap == 0.0 else logits.div_(cap).tanh_().mul_(cap)

    def timed_products(self) -> list[TimedProduct]:
        """The matrix products of a token's way, for profiling."""
        return dense_products(self.layers, self.head)

    def timed_attention(self, batch: Batch) -> list[TimedAttention]:
        """The attention of each kind of layer in a step, for profiling."""
        return dense_attention(self.layers, self.native_layers, batch)


def _do_nothing() -> None:
    """The pulse of a model that is not watched."""
