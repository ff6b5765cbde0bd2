"""Drafts of the model's head, extended by n-gram search in the row's own text."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.config import SpecConfig
from tiercel.ops.hybrid_mtp_ngram import hybrid_mtp_ngram
from tiercel.ops.ngram_match import make_ngram_workspace
from tiercel.spec.drafter_state import DrafterState, ForwardOutput
from tiercel.spec.mtp import MtpProposer
from tiercel.spec.ngram import NO_BUDGET


class HybridProposer:
    """Extends the drafts of an `MtpProposer` up to K.

    The head also writes its drafts after the committed tokens, so the search's query ends with
    them.
    """

    reads_output = True

    def __init__(self, state: DrafterState, mtp: MtpProposer, config: SpecConfig) -> None:
        self._state = state
        self._mtp = mtp
        self._config = config
        size, device = len(state.num_prompt), state.num_prompt.device
        self._zeros = torch.zeros(size, dtype=torch.int32, device=device)
        self._is_active = torch.zeros_like(self._zeros)
        self._lens = torch.zeros_like(self._zeros)
        self._num_new = torch.zeros_like(self._zeros)
        self._workspace = make_ngram_workspace(size, device)
        if device.type == "cuda":  # compile the kernel now: no step may wait for that
            self._extend(torch.full((1,), size - 1, dtype=torch.int32, device=device))

    def enter(self, rows: list[int], longest: int) -> None:
        """Do nothing: the search reads the text anew each time."""

    def update_cache(self, output: ForwardOutput) -> None:
        """See `MtpProposer`."""
        self._mtp.update_cache(output)

    def propose(self, rows: Tensor, output: ForwardOutput | None) -> None:
        """Draft with the head, then by search."""
        self._mtp.propose(rows, output)
        self._extend(rows)

    def _extend(self, rows: Tensor) -> None:
        state, row_index = self._state, rows.long()
        ids = state.drafts.draft_ids
        self._is_active.zero_().index_fill_(0, row_index, 1)
        ready = ids[:, 0]
        self._lens.copy_((ready + 1) * self._is_active)  # a length of 0 leaves a row out
        self._num_new.copy_(state.sampling.num_tokens - state.num_prompt + ready)
        hybrid_mtp_ngram(
            state.sampling.token_ids,
            state.num_prompt,
            state.sampling.token_ids,
            self._num_new,
            self._zeros,
            ids,
            self._lens,
            self._is_active,
            state.max_new,
            self._config.max_ngram,
            self._config.min_ngram,
            self._config.max_drafts,
            threshold=NO_BUDGET,
            convention="count",
            workspace=self._workspace,
            prompt_lens=state.num_prompt,
        )
        counts = torch.minimum(self._lens - 1, state.drafts.num_wanted)
        ready.index_copy_(0, row_index, counts.index_select(0, row_index))
