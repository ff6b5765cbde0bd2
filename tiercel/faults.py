"""Faults on demand, so that tests and operators see what the engine does with them.

``TIERCEL_FAULTS`` holds them, separated by commas; steps count from 1 in each engine process:

    exit@start           the process ends before it loads anything
    exit@STEP            it ends before that step, as if it was killed
    sleep:SECONDS@start  loading begins so much later
    sleep:SECONDS@STEP   that step begins so much later: an engine that hangs
    oom@STEP             that step runs out of memory
    raise@STEP           that step fails, as all do after an error of the GPU
    nan:SLOT@STEP        the logits of the engine row SLOT are NaN in that step
    slow:MS@start        every step takes MS milliseconds more for each new token, in many parts
                         with a sign of life after each: a slow machine, not a hang
    slow:MS@STEP         the same from that step on

Each may end with ``/RANK``: then only that rank of several has it, else all of them have.

They are refused unless fault injection was enabled where the engine is configured: a variable that
was left behind must not break a server.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from msgspec import Struct

from tiercel.errors import ArgumentError, OutOfMemoryError

EXIT_STATUS: Final = 3
_AT_START: Final = 0
_FAULT: Final = re.compile(
    r"(?P<kind>\w+)(?::(?P<value>\d{1,9}(?:\.\d{1,9})?))?@(?P<step>start|[1-9]\d{0,8})"
    r"(?:/(?P<rank>\d{1,3}))?"
)
_NEEDS_VALUE: Final = {
    "exit": False,
    "sleep": True,
    "oom": False,
    "raise": False,
    "nan": True,
    "slow": True,
}
_MAY_BE_AT_START: Final = ("exit", "sleep", "slow")
_SLOW_PART_S: Final = 0.05  # between two signs of life of a slow step


class Rows(Protocol):
    """What a tensor of logits offers."""

    def __setitem__(self, index: Any, value: Any, /) -> None:
        """Set a row."""


class Fault(Struct, frozen=True):
    """One fault; `value` is a row, seconds or ms, 0 where it has none; `step` 0 is the start."""

    kind: str
    value: float
    step: int


class Faults(Struct, frozen=True):
    """The faults of one engine; usually none."""

    faults: tuple[Fault, ...] = ()

    @staticmethod
    def parse(text: str, *, is_enabled: bool, rank: int = 0) -> Faults:
        """Read the faults of one rank; see the module.

        Args:
            text: faults of all ranks.
            is_enabled: whether there may be any.
            rank: of this process.

        Raises:
            ArgumentError: there are some but they are not enabled, or one cannot be read.
        """
        if not text:
            return Faults()
        if not is_enabled:
            raise ArgumentError(
                "TIERCEL_FAULTS is set but fault injection is not enabled.",
                hint="Unset it, or enable fault injection for a test.",
            )
        every = [_read(part.strip()) for part in text.split(",")]
        return Faults(tuple(fault for of_rank, fault in every if of_rank in (None, rank)))

    def at_start(self) -> None:
        """Apply the faults that come before the model is loaded."""
        self.before_step(_AT_START)

    def before_step(self, step: int) -> None:
        """Apply the faults that come before a step.

        Raises:
            OutOfMemoryError: the step shall run out of memory.
            RuntimeError: the step shall fail.
        """
        for fault in self.faults:
            if fault.step != step:
                continue
            if fault.kind == "exit":
                os._exit(EXIT_STATUS)
            elif fault.kind == "sleep":
                time.sleep(fault.value)
            elif fault.kind == "oom":
                raise OutOfMemoryError(f"step {step} ran out of memory, as TIERCEL_FAULTS asks.")
            elif fault.kind == "raise":
                raise RuntimeError(f"step {step} failed, as TIERCEL_FAULTS asks.")

    def slow_down(self, step: int, num_tokens: int, pulse: Callable[[], object]) -> None:
        """Let a step last longer.

        Args:
            step: which.
            num_tokens: its new tokens.
            pulse: called after each part of the time.
        """
        slow = (f for f in self.faults if f.kind == "slow" and f.step <= step)
        left_s = sum(fault.value for fault in slow) * num_tokens / 1000
        while left_s > 0:
            time.sleep(min(left_s, _SLOW_PART_S))
            left_s -= _SLOW_PART_S
            pulse()

    def on_logits(self, step: int, logits: Rows, rows: Sequence[int]) -> None:
        """Spoil logits of a step, in place.

        Args:
            step: which.
            logits: (L, vocab_size).
            rows: the engine row of each of the L rows.
        """
        for fault in self.faults:
            if fault.kind == "nan" and fault.step == step:
                for place, row in enumerate(rows):
                    if row == fault.value:
                        logits[place] = float("nan")


def _read(text: str) -> tuple[int | None, Fault]:
    """A fault, and the only rank that has it, or None."""
    found = _FAULT.fullmatch(text)
    if found is not None:
        kind, value, step = found["kind"], found["value"], found["step"]
        has_sound_value = _NEEDS_VALUE.get(kind) is (value is not None)
        has_sound_value &= kind != "nan" or "." not in str(value)
        if has_sound_value and (step != "start" or kind in _MAY_BE_AT_START):
            at = _AT_START if step == "start" else int(step)
            rank = None if found["rank"] is None else int(found["rank"])
            return rank, Fault(kind, float(value or 0), at)
    raise ArgumentError(
        f"TIERCEL_FAULTS: {text[:40]!r} cannot be read.",
        hint="Use exit, sleep:SECONDS, oom, raise, nan:SLOT or slow:MS, then @STEP or @start.",
    )
