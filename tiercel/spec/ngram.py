"""N-gram drafts from the row's own text: what followed its last tokens when they first came up.

All rows of the engine are one batch of `ngram_index`, at fixed addresses. On a CPU, rows that got
no tokens in a step are idle in it. On a GPU they are drafted for again, with the same result, which
costs less than telling them apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from tiercel.config import SpecConfig
from tiercel.ops.ngram_index import (
    NgramTexts,
    extend_ngram_index,
    make_ngram_index,
    ngram_index,
)
from tiercel.ops.ngram_match import make_ngram_workspace
from tiercel.spec.drafter_state import DrafterState, ForwardOutput

# Drafts of a batch have no common budget here: a step that verifies has a position for each.
NO_BUDGET: Final = 2**30
# Tokens of a new text from which blocks of threads take it into the index before the next step does
# so with a warp for each row.
_LONG_TEXT: Final = 64


class NgramProposer:
    """Looks the last tokens of each row up in its text."""

    reads_output = False

    def __init__(self, state: DrafterState, config: SpecConfig) -> None:
        token_ids = state.sampling.token_ids
        (size, room), device = token_ids.shape, token_ids.device
        self._index = make_ngram_index(
            size,
            room,
            device,
            max_ngram_size=config.max_ngram,
            min_ngram_size=config.min_ngram,
        )
        self._state = state
        self._is_active = torch.ones(size, dtype=torch.int32, device=device)
        self._is_entering = torch.zeros(size, dtype=torch.int32, device=device)
        self._lens = torch.zeros(size, dtype=torch.int32, device=device)
        self._num_new = torch.zeros(size, dtype=torch.int32, device=device)
        self._workspace = make_ngram_workspace(size, device)
        self._texts = NgramTexts(
            input_ids=token_ids,
            input_ids_len=state.num_prompt,
            token_ids_all=token_ids,
            prompt_lens=state.num_prompt,
            step_idx=self._num_new,
            draft_token_num=state.drafts.num_wanted,
            draft_tokens=state.drafts.draft_ids,
            seq_lens_this_time=self._lens,
            seq_lens_encoder=torch.zeros(size, dtype=torch.int32, device=device),
            seq_lens_decoder=self._is_active,
            max_dec_len=state.max_new,
        )
        self._entering = replace(self._texts, seq_lens_decoder=self._is_entering)
        if device.type == "cuda":  # compile the kernels now: no step may wait for that
            extend_ngram_index(self._index, self._entering, workspace=self._workspace)
            self.propose(torch.full((1,), size - 1, dtype=torch.int32, device=device))

    def enter(self, rows: list[int], longest: int) -> None:
        """Forget the former texts of rows, and take long new ones into the index immediately."""
        for row in rows:
            self._index.clear(row)
        if longest < _LONG_TEXT:
            return
        self._is_entering.zero_()
        for row in rows:
            self._is_entering[row].fill_(1)
        self._measure()
        extend_ngram_index(self._index, self._entering, workspace=self._workspace)

    def update_cache(self, output: ForwardOutput) -> None:
        """Do nothing: the text is all that is read."""

    def propose(self, rows: Tensor, output: ForwardOutput | None = None) -> None:
        """Draft for rows (R,) int32 that have just got tokens."""
        assert output is None, "the text is all that is read"
        counts = self._state.drafts.draft_ids[:, 0]
        places = rows.long() if rows.device.type == "cpu" else None
        if places is not None:
            self._is_active.zero_().index_fill_(0, places, 1)
        self._measure()
        ngram_index(self._index, self._texts, threshold=NO_BUDGET, workspace=self._workspace)
        if places is not None:
            counts.index_copy_(0, places, self._lens.index_select(0, places) - 1)
        else:
            torch.sub(self._lens, 1, out=counts)

    def _measure(self) -> None:
        torch.sub(self._state.sampling.num_tokens, self._state.num_prompt, out=self._num_new)
