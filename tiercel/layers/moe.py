"""The mixture of experts of DeepSeek-V4: router, routed experts, shared expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.layers.linear import Linear
from tiercel.layers.linear_group import GateUp, multiply_group
from tiercel.ops.moe_experts import moe_experts
from tiercel.ops.moe_experts_torch import Experts
from tiercel.ops.moe_route import moe_route, moe_route_hash
from tiercel.parallel import SINGLE, Group


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts by learned scores, or by a table of token ids.

    Attributes:
        gate: from hidden to a logit for each expert, float32.
        bias: (experts,) float32, of the choice; None with a table.
        table: (vocab, topk) int64, the experts of each token id; None with a bias.
        topk: experts of a token.
        scale: of the weights.
    """

    gate: Linear
    bias: Tensor | None
    table: Tensor | None
    topk: int
    scale: float

    def __call__(
        self, logits: Tensor, token_ids: Tensor, own: range | None = None
    ) -> tuple[Tensor, Tensor]:
        """Experts (T, topk) int64 and their weights (T, topk) float32, of logits of `gate`.

        own: experts that this rank has, see `ops.moe_route`; None: all.
        """
        if self.table is not None:
            return moe_route_hash(logits, self.table, token_ids, scale=self.scale, own=own)
        assert self.bias is not None, "a router has a bias or a table"
        return moe_route(logits, self.bias, topk=self.topk, scale=self.scale, own=own)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that every token passes.

    Attributes:
        gate_up: w1 and w3, one after the other.
        down: w2.
        limit: of the clamped SwiGLU; None for no clamp.
    """

    gate_up: Linear
    down: Linear
    limit: float | None


@dataclass(frozen=True, slots=True)
class MoE:
    """Routed experts and the shared one.

    Ranks that share a model have a part of the inner width of every expert, or whole ones of their
    own. Either way the outputs of all are sums over ranks, and are added together, once. Where each
    rank has tokens of its own, the rows of all come together first, and each gets its own sums.

    Attributes:
        router: chooses experts.
        experts: stacks of weights, this rank's part.
        shared: the shared expert.
        limit: of the routed experts' clamped SwiGLU; None for no clamp.
        rounds_activations: whether the inputs of the routed experts' products are rounded.
        group: ranks that have the other parts.
        own: experts of this rank, where it has whole ones; None: it has a part of each.
    """

    router: Router
    experts: Experts
    shared: SharedExpert
    limit: float | None
    rounds_activations: bool
    group: Group = SINGLE
    own: range | None = None

    def __call__(self, x: Tensor, token_ids: Tensor, rank_tokens: Sequence[int] = ()) -> Tensor:
        """(T, hidden) normed to (T, hidden) float32.

        Args:
            x: of this rank's tokens.
            token_ids: the input tokens, int32, for a table: (T,), or those of all ranks.
            rank_tokens: see `Batch`.
        """
        if not rank_tokens:
            return self.group.all_reduce(self._own_part(x, token_ids))
        part = self._own_part(self.group.gather_rows(x, rank_tokens), token_ids)
        return self.group.scatter_sums(part, rank_tokens)[: x.shape[0]]

    def _own_part(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """What this rank's weights make of rows, a part of their sums."""
        shared = self.shared
        parts: list[Linear | GateUp] = [self.router.gate, GateUp(shared.gate_up, shared.limit)]
        logits, inner = multiply_group(x, parts)
        (added,) = multiply_group(inner, [shared.down], is_wide=True)
        ids, weights = self.router(logits, token_ids, self.own)
        return moe_experts(
            x,
            ids,
            weights,
            self.experts,
            limit=self.limit,
            rounds_activations=self.rounds_activations,
            out_dtype=torch.float32,  # the sum of both is rounded once
            num_ranks=1 if self.own is None else self.group.size,
            addend=added,
        )
