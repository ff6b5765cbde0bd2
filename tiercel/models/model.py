"""The interface of a model: all that runner, engine, proposers and profiling know of one.

A model has its weights on one device, says what its layers keep for each token, and passes a
`Batch` of new tokens through all of them. Its cache specs, its states and its attention metadata
are its own matter: the code that runs steps sees a list of specs, a width and a dtype, and objects
that it keeps and hands back.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.batch import Batch, BatchLengths
from tiercel.cache.pool import CachePool
from tiercel.cache.spec import KVCacheSpec
from tiercel.config import ModelOptions
from tiercel.models.config import Architecture, ModelConfig
from tiercel.models.weights import WeightReader
from tiercel.parallel import SINGLE, Group


class PlanBuffer(Protocol):
    """Device memory for attention metadata of one kind, at a fixed address: a graph reads it."""

    @property
    def plan(self) -> object:
        """The metadata that a `Batch` carries in `plans`; only the model's layers read it."""

    # Any: a buffer takes plans of its own kind alone.
    def fill(self, planned: Any) -> None:
        """Enqueue the copy of other metadata of the same kind."""


class AttentionPlan(Protocol):
    """Attention metadata of one step on the host, for layers that share it."""

    @property
    def kind(self) -> Hashable:
        """What a graph is captured for: plans of one kind fill one buffer."""

    def make_buffer(self, num_tokens: int, num_reqs: int, device: torch.device) -> PlanBuffer:
        """Memory for any step of this kind with up to so many tokens and requests."""


class DraftHead(Protocol):
    """A part of a model that predicts the token after next from a token's state."""

    def forward(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Pass some positions through the head.

        Args:
            batch: of the positions p, with the tokens at p + 1.
            hidden: (T, state_width) at p, of the model's `forward` or of this one.

        Returns:
            (T, state_width).
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """(L, vocab_size) float32 of the tokens at p + 2, from (L, state_width) of `forward`."""


class TimedProduct(Struct, frozen=True):
    """One kind of matrix product, for profiling.

    Attributes:
        name: of the kind.
        shape: (out_features, in_features).
        calls: of each layer; takes (T, in_features) in the model's dtype.
        weight_bytes: of all these layers together, as they rest.
    """

    name: str
    shape: tuple[int, int]
    calls: tuple[Callable[[Tensor], Tensor], ...]
    weight_bytes: int


class TimedAttention(Struct, frozen=True):
    """Attention of the layers of one kind in one step, for profiling.

    Attributes:
        name: of the kind.
        calls: of each layer.
        cache_bytes: of keys and values that one layer reads.
        num_bytes: the fewest that must move in one layer: cache, queries, results.
        flops: operations of one layer.
    """

    name: str
    calls: tuple[Callable[[], Tensor], ...]
    cache_bytes: int
    num_bytes: int
    flops: int


class Model(Protocol):
    """A model with its weights on one device.

    Attributes:
        pulse: called now and then while a CPU computes a step; does nothing unless replaced.
    """

    pulse: Callable[[], None]

    @property
    def config(self) -> ModelConfig:
        """The sizes that its file names."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of products and of the cache."""

    @property
    def block_size(self) -> int:
        """Tokens of a cache block."""

    @property
    def state_width(self) -> int:
        """Elements of a token's state, the result of `forward`."""

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of states."""

    @property
    def packs_items(self) -> bool:
        """Whether a step may hold items to score after their prompt (`Batch.items`)."""

    @property
    def weights_per_layer(self) -> int:
        """Weights that a token is multiplied with in one layer, about."""

    @property
    def draft_head(self) -> DraftHead | None:
        """The head that drafts; None if it was not loaded."""

    def cache_specs(self) -> Sequence[KVCacheSpec]:
        """What the model keeps for each token: one spec or more a layer, in an order of its own.

        Equal specs share a pool; `CachePool.layers` is keyed by the index in this list.
        """

    def bind_cache(self, pools: Sequence[CachePool]) -> None:
        """Take the memory of the cache; pool g is found through `Batch.block_tables[g]`."""

    def plan(self, lengths: BatchLengths) -> Mapping[Any, AttentionPlan]:
        """Attention metadata of a step that prompt graphs keep, by keys of the model.

        The host knows these lengths; metadata may depend on nothing else. An empty mapping means
        that attention reads `cu_seqlens_q`, `seq_lens` and `rows` on the device.
        """

    def forward(self, batch: Batch) -> Tensor:
        """Pass new tokens through all layers; (T, state_width) state_dtype."""

    def forward_sample(self, batch: Batch) -> Tensor:
        """Launch every kernel that `forward` launches, with as few layers as that takes.

        For loading kernels and measuring memory; only the shape of the result is that of `forward`.
        """

    def hidden_states(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """(L, hidden_size) float32 normed hidden states of the tokens `rows` (L,) int32."""

    def logits(
        self, hidden: Tensor, rows: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Logits of some tokens.

        Args:
            hidden: (T, state_width) from `forward`.
            rows: (L,) int32 indices of tokens; None for all.
            out: (L, vocab_size) float32 for the result; None for a new tensor.

        Returns:
            (L, vocab_size) float32.
        """

    def token_logits(self, hidden: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
        """(L, K) float32 logits of the token ids `token_ids` (K,) int64 alone."""

    def best_tokens(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The largest logits of each token; of equal ones the lowest token id first.

        Where several ranks share the model, few numbers pass between them: not all logits.

        Args:
            hidden: (L, state_width) from `forward`.
            count: of a token.

        Returns:
            (L, count) float32 logits, descending, and their (L, count) int64 token ids.
        """

    def timed_products(self) -> Sequence[TimedProduct]:
        """The model's matrix products; none: they are not profiled."""

    def timed_attention(self, batch: Batch) -> Sequence[TimedAttention]:
        """The model's attention in a step, by kind of layer; none: profiling leaves it out."""


class ModelClass(Protocol):
    """A class of models, and what is known of it before anything is loaded."""

    @property
    def block_size(self) -> int:
        """See `Model`."""

    @property
    def packs_items(self) -> bool:
        """See `Model`."""

    @property
    def exact_tokens(self) -> int | None:
        """Most tokens of a step on a GPU whose bits depend on no other token; None: no bound.

        ``TIERCEL_EXACT`` keeps steps below it.
        """

    def check_options(self, config: ModelConfig, options: ModelOptions) -> None:
        """Refuse options that the model does not have.

        Raises:
            ArgumentError: names the option.
        """

    def __call__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        dtype: torch.dtype,
        num_positions: int,
        options: ModelOptions,
        group: Group = SINGLE,
    ) -> Model:
        """Load a model.

        Args:
            config: the shape; of all ranks together.
            weights: reads the parts of this rank.
            dtype: of products.
            num_positions: of the longest sequence, its drafts included.
            options: see `check_options`.
            group: the ranks that share the model, as `weights.sharding` says.
        """


def model_class(family: Architecture) -> ModelClass:
    """The class that runs a family, imported on demand."""
    module, name = family.model.split(":")
    result: ModelClass = getattr(importlib.import_module(module), name)
    return result
