"""Which of several engines a request goes to: pure functions of what is known about them.

The engine with the least tokens to compute wins: those that its requests wait for, and those of the
new request that it does not have in its prefix cache. Of equal ones the longest known prefix wins,
then the fewest requests, then the engine that was chosen longest ago. So an idle server sends each
conversation where its history is cached, and a busy one spreads a prompt that everybody shares as
soon as waiting for it would take longer than computing it again.

What an engine has cached is not asked but remembered: the blocks of the prompts that it was sent,
as many as its cache holds. The engine decides itself what it still has; a wrong guess costs time,
never correctness. So keys are hashes here, where the engine compares tokens (`cache/prefix.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tiercel.cache.prefix import ROOT

MAX_KNOWN_BLOCKS: Final = 1 << 16


def block_keys(token_ids: Sequence[int], block_size: int) -> list[int]:
    """A key of each full block, which depends on all tokens before it too.

    The last token is left out: an engine computes it always.
    """
    keys, parent = [], ROOT
    for start in range(0, (len(token_ids) - 1) // block_size * block_size, block_size):
        parent = hash((parent, *token_ids[start : start + block_size]))
        keys.append(parent)
    return keys


class KnownBlocks:
    """Keys of the blocks that an engine probably has in its prefix cache."""

    def __init__(self, capacity: int) -> None:
        """Set up.

        Args:
            capacity: blocks of the engine's cache; of more the oldest are forgotten.
        """
        self._capacity = min(capacity, MAX_KNOWN_BLOCKS)
        self._keys: dict[int, None] = {}  # the one that was not used for longest first

    def __len__(self) -> int:
        return len(self._keys)

    def count(self, keys: Iterable[int]) -> int:
        """Number of blocks at the start of a prompt that are known."""
        known = 0
        for key in keys:
            if key not in self._keys:
                break
            known += 1
        return known

    def note(self, keys: Iterable[int]) -> None:
        """The engine computes, or reads, these blocks."""
        # The first block last: what is evicted first is the end of a prompt, as in the engine.
        for key in reversed(list(keys)):
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self._capacity:
            del self._keys[next(iter(self._keys))]

    def clear(self) -> None:
        """The engine has an empty cache."""
        self._keys.clear()


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that could take a request.

    Attributes:
        number: number of the engine.
        waiting_tokens: tokens that it has yet to compute for other requests.
        known_tokens: tokens at the start of the prompt that it has probably cached.
        num_requests: requests in it.
        last_turn: when it was chosen last; larger is later.
    """

    number: int
    waiting_tokens: int = 0
    known_tokens: int = 0
    num_requests: int = 0
    last_turn: int = 0


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The engine that a request goes to; see the module.

    Args:
        candidates: at least one.
    """
    return min(
        candidates,
        key=lambda engine: (
            engine.waiting_tokens - engine.known_tokens,  # and the prompt, for all alike
            -engine.known_tokens,
            engine.num_requests,
            engine.last_turn,
            engine.number,
        ),
    )
