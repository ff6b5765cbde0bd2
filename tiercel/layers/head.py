"""The output matrix: from normed hidden states to logits of the vocabulary.

Where several ranks share a model, each has the rows of some token ids. Logits of all ids are then a
gather of as many numbers as there are ids; the best few of them, or those of a few ids, are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.layers.linear import Linear
from tiercel.ops.linear import LinearWeight, linear, pick_rows
from tiercel.parallel import SINGLE, Group


class Head:
    """x @ W^T, with rows of W on each rank: equal shares, but the last rank may have fewer."""

    def __init__(self, own: Linear, vocab_size: int, group: Group = SINGLE) -> None:
        """Take the weights.

        Args:
            own: the rows of this rank, to float32.
            vocab_size: rows of all ranks.
            group: the ranks that have the others.
        """
        self._own = own
        self._vocab_size = vocab_size
        self._group = group
        self._share = -(-vocab_size // group.size)
        self._first = group.rank * self._share

    @property
    def weight(self) -> LinearWeight:
        """The rows of this rank."""
        return self._own.weight

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """All logits.

        Args:
            x: (L, hidden), normed.
            out: (L, vocab_size) float32 for the result; None for a new tensor.

        Returns:
            (L, vocab_size) float32.
        """
        if self._group.size == 1:
            return self._own(x, out)
        parts = self._group.all_gather(self._padded(x).unsqueeze(0), dim=0)
        if out is None:
            out = torch.empty((x.shape[0], self._vocab_size), device=x.device)
        if len(parts) * self._share == self._vocab_size:  # one copy
            out.view(len(x), len(parts), self._share).copy_(parts.transpose(0, 1))
            return out
        return out.copy_(torch.cat(parts.unbind(), dim=1)[:, : self._vocab_size])

    def token_logits(self, x: Tensor, token_ids: Tensor) -> Tensor | None:
        """Logits of some token ids; None where their rows cannot be read alone.

        Args:
            x: (L, hidden), normed.
            token_ids: (K,) int64.

        Returns:
            (L, K) float32.
        """
        local, is_own = own_ids(token_ids, self._first, self.weight.shape[0], self._group)
        picked = pick_rows(self.weight, local)
        if picked is None:
            return None
        logits = linear(x, picked, out_dtype=torch.float32)
        if is_own is None:
            return logits
        return self._group.all_reduce(logits.masked_fill_(~is_own, 0.0))

    def best(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The largest logits; of equal ones the lowest id first.

        Args:
            x: (L, hidden), normed.
            count: of a row.

        Returns:
            (L, count) float32 logits, descending, and their (L, count) int64 ids.
        """
        logits = self._padded(x)
        if count == 1:  # the first of equal ones
            values, ids = logits.max(dim=1, keepdim=True)
        else:
            values, ids = logits.sort(dim=1, descending=True, stable=True)
            values, ids = values[:, :count].contiguous(), ids[:, :count]
        return self._group.merge_top(values, ids + self._first, count)

    def _padded(self, x: Tensor) -> Tensor:
        """Logits of the rank's ids, and -inf in place of those that the last rank lacks."""
        logits = self._own(x)
        missing = self._share - logits.shape[1]
        if not missing:
            return logits
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))


def own_ids(
    token_ids: Tensor, first: int, count: int, group: Group
) -> tuple[Tensor, Tensor | None]:
    """Rows of a rank's part of a table for token ids, and which of the ids it has.

    Args:
        token_ids: of any shape.
        first: the rank's first id.
        count: its ids.
        group: the ranks that have the others.

    Returns:
        Rows, 0 for ids of other ranks; and a mask of the rank's own, None in a group of one.
    """
    if group.size == 1:
        return token_ids, None
    local = token_ids - first
    is_own = (local >= 0) & (local < count)
    return local.where(is_own, 0), is_own
