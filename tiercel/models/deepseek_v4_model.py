"""DeepSeek-V4: residual streams, compressed attention, mixture of experts.

    X[j] = embedding[token], j = 0..3
    for each layer, for attention, then for experts:  X = mix(X, part(norm(collapse(X))))
    logits = head(norm(collapse(X)))

`deepseek_v4.py` has the config, `deepseek_v4_build.py` loads the parts, `deepseek_v4_draft.py` has
the head that drafts. Source: the technical report and inference code published with DeepSeek-V4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from tiercel.batch import Batch, BatchLengths
from tiercel.cache.pool import CachePool
from tiercel.cache.spec import KVCacheSpec
from tiercel.config import ModelOptions
from tiercel.errors import ArgumentError
from tiercel.layers.compressed_attention import OVERLAP_ROWS, CompressedAttention
from tiercel.layers.mhc import Residual
from tiercel.layers.mhc_layer import HyperLayer
from tiercel.models.config import ModelConfig
from tiercel.models.deepseek_v4 import BLOCK_SIZE, CSA_RATIO, DeepseekV4Config
from tiercel.models.deepseek_v4_build import DeepseekV4Builder
from tiercel.models.deepseek_v4_draft import DeepseekV4DraftHead
from tiercel.models.model import AttentionPlan, TimedAttention, TimedProduct
from tiercel.models.weights import WeightReader
from tiercel.ops.linear_group import MAX_TOKENS
from tiercel.ops.rms_norm import rms_norm
from tiercel.ops.step_index import step_index
from tiercel.ops.step_index_torch import CompressKind, StepIndex
from tiercel.parallel import SINGLE, Group
from tiercel.quant import take_rows


class DeepseekV4:
    """DeepSeek-V4 with its weights on one device; the methods are those of `Model`.

    Attributes:
        pulse: called after each layer and the head; does nothing unless replaced.
    """

    block_size: ClassVar[int] = BLOCK_SIZE
    packs_items: ClassVar[bool] = False
    exact_tokens: ClassVar[int | None] = MAX_TOKENS

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
            config: a `DeepseekV4Config`, checked against the file already.
            weights: reads the file's tensors to the device.
            dtype: of products.
            num_positions: positions that rotary tables cover.
            options: storage of the cache, and rounding.
            group: the ranks that share the model, as `weights.sharding` says.
        """
        assert isinstance(config, DeepseekV4Config), "the registry pairs config and class"
        self.config: DeepseekV4Config = config
        self.dtype = dtype
        self.state_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
        self.pulse: Callable[[], None] = _do_nothing
        options = _resolve(config, options, weights.device)
        builder = DeepseekV4Builder(config, weights, dtype, num_positions, options, group)
        self.embedding = builder.embedding()
        self.layers = [
            builder.layer(
                f"layers.{i}",
                config.compress_ratios[i],
                is_hash_routed=i < config.num_hash_layers,
            )
            for i in range(config.num_layers)
        ]
        self._collapse = builder.collapse("")
        self._norm = builder.norm("norm")
        self.head = builder.head()
        self.draft_head = None
        if config.num_mtp_layers:
            self.draft_head = DeepseekV4DraftHead(builder, self.embedding, self.head, self._index)
        self._group = group
        self._window_group = 0
        self._kinds: list[CompressKind] = []

    @staticmethod
    def check_options(config: ModelConfig, options: ModelOptions) -> None:
        """Refuse what the model cannot do.

        Raises:
            ArgumentError: an encoded cache for heads that do not have whole groups.
        """
        assert isinstance(config, DeepseekV4Config), "the registry pairs config and class"
        if options.kv_dtype == "fp8" and not config.can_encode_cache:
            raise ArgumentError(
                "kv_dtype='fp8': head_dim - qk_rope_head_dim is "
                f"{config.head_dim - config.rotary_dim}, index_head_dim {config.index_head_dim}.",
                hint="They must be multiples of 64 and of 32; use bf16 or float32.",
            )

    @property
    def state_width(self) -> int:
        """Elements of a token's state: all streams."""
        return self.config.num_streams * self.config.hidden_size

    @property
    def weights_per_layer(self) -> int:
        """Weights that a token is multiplied with in one layer, about."""
        config = self.config
        heads = config.num_heads * config.head_dim
        attention = config.hidden_size * (config.q_lora_rank + config.head_dim)
        attention += heads * (config.q_lora_rank + config.o_lora_rank)
        attention += config.num_output_groups * config.o_lora_rank * config.hidden_size
        experts = config.num_experts_per_tok + config.num_shared_experts
        return attention + 3 * experts * config.hidden_size * config.intermediate_size

    @property
    def _attentions(self) -> list[CompressedAttention]:
        """Of all layers, that of the draft head last."""
        found = [layer.attention for layer in self.layers]
        return found + ([] if self.draft_head is None else [self.draft_head.layer.attention])

    def cache_specs(self) -> list[KVCacheSpec]:
        """What the layers keep: of each the window, then entries and their inputs."""
        window = self.config.sliding_window
        return [spec for layer in self._attentions for spec in layer.cache_specs(window)]

    def bind_cache(self, pools: Sequence[CachePool]) -> None:
        """Give each layer its planes, and find the groups."""
        found = {
            index: (group, planes)
            for group, pool in enumerate(pools)
            for index, planes in pool.layers.items()
        }
        kinds: dict[int, CompressKind] = {}
        first = 0
        for layer in self._attentions:
            count = len(layer.cache_specs(self.config.sliding_window))
            groups, planes = zip(*(found[first + i] for i in range(count)), strict=True)
            layer.bind_cache(list(planes))
            first += count
            self._window_group = groups[0]
            if layer.compression is not None:
                ratio = layer.compression.ratio
                is_csa = ratio == CSA_RATIO
                rows = OVERLAP_ROWS if is_csa else BLOCK_SIZE
                kinds[ratio] = CompressKind(ratio, is_csa, groups[1], groups[2], rows)
        self._kinds = list(kinds.values())

    def plan(self, lengths: BatchLengths) -> dict[str, AttentionPlan]:  # noqa: ARG002
        """Nothing: attention reads lengths on the device."""
        return {}

    def forward(self, batch: Batch) -> Tensor:
        """Pass the new tokens through all layers; (T, streams * hidden), before the collapse."""
        return self._pass(self.layers, batch)

    def forward_sample(self, batch: Batch) -> Tensor:
        """Launch what `forward` launches: one layer of every kind."""
        kinds: dict[tuple[int, bool], HyperLayer] = {}
        for ratio, layer in zip(self.config.compress_ratios, self.layers, strict=False):
            kinds.setdefault((ratio, layer.moe.router.table is None), layer)
        return self._pass(list(kinds.values()), batch)

    def _index(self, batch: Batch, *, has_window_alone: bool = False) -> StepIndex:
        kinds = [] if has_window_alone else self._kinds
        window = self.config.sliding_window
        return step_index(batch, BLOCK_SIZE, window, self._window_group, kinds)

    def _pass(self, layers: Sequence[HyperLayer], batch: Batch) -> Tensor:
        step = self._index(batch)
        x = self.embedding(batch.input_ids).to(self.state_dtype)
        residual = Residual(x.unsqueeze(1).repeat(1, self.config.num_streams, 1))
        token_ids, counts = batch.input_ids, batch.rank_tokens
        if counts:  # once for all layers with a table
            token_ids = self._group.gather_rows(token_ids, counts)
        for layer in layers:
            residual = layer(residual, token_ids, step, counts)
            self.pulse()
        return residual.settled().flatten(1)

    def _collapsed(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """(L, hidden) before the final norm."""
        states = hidden if rows is None else take_rows(hidden, rows)
        # No size is left to be inferred: there may be no rows.
        return self._collapse(states.view(-1, self.config.num_streams, self.config.hidden_size))

    def hidden_states(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """(L, hidden) float32 normed hidden states of the tokens `rows` (L,) int32."""
        norm = self._norm
        return rms_norm(self._collapsed(hidden, rows), norm.weight, norm.eps, torch.float32)

    def logits(
        self, hidden: Tensor, rows: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Logits of some tokens; see `Model`."""
        logits = self.head(self._norm(self._collapsed(hidden, rows)), out)
        self.pulse()
        return logits

    def token_logits(self, hidden: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
        """(L, K) float32 logits of the token ids `token_ids` (K,) int64 alone."""
        x = self._norm(self._collapsed(hidden, rows))
        logits = self.head.token_logits(x, token_ids)
        return self.head(x).index_select(1, token_ids) if logits is None else logits

    def best_tokens(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The largest logits and their token ids; see `Model`."""
        best = self.head.best(self._norm(self._collapsed(hidden, None)), count)
        self.pulse()
        return best

    def timed_products(self) -> list[TimedProduct]:
        """None: weights are decoded in each product."""
        return []

    def timed_attention(self, batch: Batch) -> list[TimedAttention]:  # noqa: ARG002
        """None."""
        return []


def _resolve(config: DeepseekV4Config, options: ModelOptions, device: torch.device) -> ModelOptions:
    """Choose how the cache rests where no option says it: encoded on a GPU, unrounded on a CPU."""
    if options.kv_dtype != "auto":
        return options
    if device.type == "cpu":
        return replace(options, kv_dtype="float32")
    return replace(options, kv_dtype="fp8" if config.can_encode_cache else "bf16")


def _do_nothing() -> None:
    """The pulse of a model that is not watched."""
