"""A step of prefill attention as the host knows it: lengths, and where items begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tiercel.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """What becomes of the product of a query and a key.

    Attributes:
        scale: multiplies it.
        window: 0 for none.
        softcap: 0 for none.
    """

    scale: float
    window: int
    softcap: float


@dataclass(frozen=True, slots=True)
class StepLengths:
    """A step as the host knows it.

    Attributes:
        query: new tokens of each request.
        context: its length with them.
        prefix: P of each request, at most its length.
        item_start: (T,) int32, None without items.
    """

    query: tuple[int, ...]
    context: tuple[int, ...]
    prefix: tuple[int, ...]
    item_start: npt.NDArray[np.int32] | None

    @property
    def has_items(self) -> bool:
        return self.item_start is not None


def read_lengths(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    prefix_len: Sequence[int] | None,
    item_start: Tensor | None,
    *,
    are_items_checked: bool = False,
) -> StepLengths:
    """Check lengths and item starts among each other.

    Raises:
        ArgumentError: they disagree, or an item begins outside of its step.
    """
    query, context = tuple(query_lens), tuple(context_lens)
    pairs = zip(query, context, strict=False)
    if len(query) != len(context) or not all(0 < new <= length for new, length in pairs):
        raise ArgumentError(
            f"prefill_attention: query_lens {query} do not fit context_lens {context}.",
            hint="Give each request 1 or more new tokens, at most its length.",
        )
    if prefix_len is None and item_start is None:
        return StepLengths(query, context, context, None)
    if prefix_len is None or item_start is None or item_start.is_cuda:
        raise ArgumentError(
            "prefill_attention: prefix_len and item_start do not both lie on the host.",
            hint="Pass both, a sequence and a CPU tensor, or neither.",
        )
    prefix = tuple(min(p, length) for p, length in zip(prefix_len, context, strict=False))
    starts = item_start.numpy()
    if (
        len(prefix_len) != len(query)
        or min(prefix_len, default=0) < 0
        or starts.shape != (sum(query),)
        or starts.dtype != np.int32
    ):
        raise ArgumentError(
            f"prefill_attention: prefix_len {tuple(prefix_len)} and item_start "
            f"{starts.shape} {starts.dtype} do not fit {len(query)} requests, {sum(query)} tokens.",
            hint="Pass a prefix_len >= 0 per request and an int32 item_start per token.",
        )
    if not are_items_checked:
        _check_items(query, context, prefix, starts)
    return StepLengths(query, context, prefix, starts if prefix != context else None)


def _check_items(
    query: tuple[int, ...],
    context: tuple[int, ...],
    prefix: tuple[int, ...],
    starts: npt.NDArray[np.int32],
) -> None:
    """Every item must rise, and begin in this step behind the prefix."""
    at = 0
    for request, (new, length) in enumerate(zip(query, context, strict=True)):
        if prefix[request] >= length:
            at += new
            continue
        first = length - new
        least = max(first, prefix[request])
        own = starts[at + least - first : at + new]
        at += new
        is_sound = (own >= least) & (own <= np.arange(least, length) + 1)
        is_sound[1:] &= own[1:] >= own[:-1]
        if not is_sound.all():
            bad = int(np.argmin(is_sound))
            raise ArgumentError(
                f"prefill_attention: item_start of request {request} at index {least + bad} "
                f"is {int(own[bad])}.",
                hint=f"From index {least} on (prefix and cached tokens end there) it must rise, "
                f"from {least} or more to at most a token's own index + 1.",
            )
