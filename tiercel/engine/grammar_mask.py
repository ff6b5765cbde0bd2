"""Puts the masks of grammars on logits: the only part of constrained output that needs PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tiercel.engine.grammar_matcher import GrammarMatcher

NEG_INF = float("-inf")


def make_masks(matchers: Sequence[GrammarMatcher]) -> Tensor:
    """The tokens that may come next, a bit each.

    Args:
        matchers: of one vocabulary; the `error` of one that fails is set, its mask is of no use.

    Returns:
        (len(matchers), ceil(vocab_size / 32)) int32 on the host; bit i % 32 of word i // 32 is
        token i.
    """
    masks = np.empty((len(matchers), matchers[0].num_words), np.int32)
    for row, matcher in zip(masks, matchers, strict=True):
        matcher.fill_mask(row)
    return torch.from_numpy(masks)


def apply_masks(logits: Tensor, rows: Sequence[int], matchers: Sequence[GrammarMatcher]) -> None:
    """Set the logits of tokens that may not come to minus infinity, without waiting for the device.

    Args:
        logits: (L, vocab_size) float, changed in place.
        rows: lines of `logits`, one per matcher.
        matchers: their states, each before the token that is drawn now.
    """
    if not rows:
        return
    device, vocab_size = logits.device, logits.shape[1]
    masks, lines = make_masks(matchers), torch.tensor(rows, dtype=torch.int64)
    if device.type != "cpu":
        masks = masks.pin_memory().to(device, non_blocking=True)
        lines = lines.pin_memory().to(device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    bits = (masks.unsqueeze(-1) >> shifts) & 1
    banned = bits.flatten(1)[:, :vocab_size] == 0
    logits.index_copy_(0, lines, logits.index_select(0, lines).masked_fill(banned, NEG_INF))
