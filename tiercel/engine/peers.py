"""What one of several ranks does otherwise than an engine alone, for loading.

All ranks of a model load and run the same code. What would differ between them, because it was
measured or depends on memory, they agree on here, in the same order on every rank. An engine alone
(`ALONE`) agrees with itself: it waits for nobody and starts nothing. The ranks of several processes
are in `ipc/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import torch

from tiercel.engine.engine import Engine
from tiercel.engine_config import EngineConfig
from tiercel.errors import TiercelError
from tiercel.grammar.matchers import Matchers
from tiercel.parallel import SINGLE, Group
from tiercel.runner.runner import ModelRunner
from tiercel.scheduler.joint import AnyScheduler
from tiercel.text.tokenizer import Tokenizer

OnFailure = Callable[[TiercelError], None]  # told of another rank's failure


class Peers(Protocol):
    """The other ranks of a model, as one of them sees them."""

    @property
    def rank(self) -> int:
        """The rank of this process; rank 0 decides what is computed."""

    @property
    def group(self) -> Group:
        """All ranks, for collectives, once they are connected."""

    def check(self, facts: Mapping[str, str]) -> None:
        """Compare what must be the same on every rank.

        Raises:
            ArgumentError: names the rank and what differs.
        """

    def connect(self, device: torch.device) -> None:
        """Connect the group; `device` of this rank.

        Raises:
            RankLostError: a rank does not answer.
        """

    def least(self, what: str, value: int) -> int:
        """The least value of all ranks; `what` names it."""

    def first(self, what: str, values: Sequence[float]) -> list[float]:
        """The values of rank 0; `what` names them."""

    def engine(self, scheduler: AnyScheduler, runner: ModelRunner, config: EngineConfig) -> Engine:
        """The engine of this rank."""

    def matchers(self, tokenizer: Tokenizer, vocab_size: int) -> Matchers:
        """The matchers of this rank's requests."""

    def begin(self) -> None:
        """Rank 0 has warmed up; from here on a rank that is silent hangs."""

    def close(self) -> None:
        """End the other ranks; safe to call again."""


class _Alone:
    """No other ranks."""

    rank: Final = 0
    group: Final = SINGLE

    def check(self, facts: Mapping[str, str]) -> None:
        """Nothing can differ."""

    def connect(self, device: torch.device) -> None:
        """There is nobody to meet."""

    def least(self, what: str, value: int) -> int:  # noqa: ARG002
        return value

    def first(self, what: str, values: Sequence[float]) -> list[float]:  # noqa: ARG002
        return list(values)

    def engine(self, scheduler: AnyScheduler, runner: ModelRunner, config: EngineConfig) -> Engine:
        return Engine(scheduler, runner, config)

    def matchers(self, tokenizer: Tokenizer, vocab_size: int) -> Matchers:
        return Matchers(tokenizer, vocab_size)

    def begin(self) -> None:
        """Nobody waits for it."""

    def close(self) -> None:
        """Nothing was started."""


ALONE: Final = _Alone()
