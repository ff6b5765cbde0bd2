"""Repetition, frequency and presence penalties from counts that stay on the device.

Sources: "CTRL", arXiv 1909.05858, for repetition; the OpenAI API reference for the other two.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tiercel.request.request import Request
from tiercel.runner.row_state import Rows, to_device

# Largest logit of a repeated token: finite, also divided by the least temperature. The difference
# of two infinities would be NaN.
_MOST = 1e30


class Penalties:
    """Counts of the tokens that each row has seen in its prompt and in its answer."""

    def __init__(self, vocab_size: int, rows: Rows) -> None:
        self._vocab_size = vocab_size
        self._rows = rows
        # Made for the first request with a penalty: most never come.
        self._counts: Tensor | None = None  # (S, vocab_size) int32, of output tokens
        self._in_prompt: Tensor | None = None  # (S, vocab_size) bool

    def enter(self, request: Request) -> None:
        """Count the tokens of a request that gets its row now: none of them is in flight."""
        counts, in_prompt = self._tables()
        device, row = self._rows.device, request.row

        def ids(values: list[int]) -> Tensor:
            return to_device(np.array(values, np.int64), device)

        output = ids(request.output_token_ids)
        ones = torch.ones(len(output), dtype=torch.int32, device=device)
        counts[row].zero_().index_add_(0, output, ones)
        in_prompt[row].zero_().index_fill_(0, ids(request.prompt_token_ids), 1)

    def apply(
        self, logits: Tensor, rows: Tensor, drafts: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Apply the penalties to some logits rows.

        Args:
            logits: (P, vocab_size) float32.
            rows: (P,), engine row of each.
            drafts: (P, K) int64 token ids, and (P, K) int32, 1 for drafts before the logits row.

        Returns:
            (P, vocab_size) float32.
        """
        counts, in_prompt = self._tables()
        count = counts.index_select(0, rows)
        if drafts is not None:
            count.scatter_add_(1, *drafts)
        is_used = count > 0
        is_seen = is_used | in_prompt.index_select(0, rows)

        def column(name: str) -> Tensor:
            return self._rows.values[name].index_select(0, rows).unsqueeze(1)

        repetition = column("repetition")
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(is_seen, repeated.clamp(max=_MOST), logits)
        charge = count * column("frequency") + column("presence")
        penalised: Tensor = torch.where(is_used, logits - charge, logits)
        return penalised

    def count(self, rows: Tensor, token_ids: Tensor, is_new: Tensor | None = None) -> None:
        """Add sampled tokens to the counts of some rows.

        Args:
            rows: (P,), engine rows.
            token_ids: (P,), one token for each row; or (P, W) with `is_new`.
            is_new: (P, W) int32, 1 for the tokens that count.
        """
        counts, _ = self._tables()
        if is_new is None:
            is_new = torch.ones((), dtype=torch.int32, device=rows.device)
        else:
            rows = rows.unsqueeze(1).expand_as(token_ids)
        counts.index_put_((rows.long(), token_ids.long()), is_new, accumulate=True)

    def _tables(self) -> tuple[Tensor, Tensor]:
        if self._counts is None or self._in_prompt is None:
            shape, device = (self._rows.scratch + 1, self._vocab_size), self._rows.device
            self._counts = torch.zeros(shape, dtype=torch.int32, device=device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
        return self._counts, self._in_prompt
