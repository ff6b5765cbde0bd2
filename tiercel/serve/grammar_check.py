"""Finds out, at a bounded cost, whether a grammar can be enforced, before the engine hears of it.

Compiling happens in processes of their own (`grammar_worker.py`). What was found is kept by the
grammar's hash: a line of text for each, so that 256 of them are the only bound that is needed;
compiled grammars are not kept, because llguidance's copies share one budget of states.
"""

from __future__ import annotations

import asyncio
import base64
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

from tiercel.engine.grammar import GrammarSpec
from tiercel.engine.grammar_matcher import TOO_COMPLEX, TokenTable
from tiercel.engine.json_schema import refuse
from tiercel.params import LIMITS
from tiercel.text.child_client import ChildProgram, ChildWorkers, WorkerLostError

MAX_KEPT: Final = 256
# A busy machine can be what made a grammar slow: after this long it gets another chance.
LOST_SECONDS: Final = 60.0
NUM_WORKERS: Final = 2


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What was found about a grammar.

    Attributes:
        refusal: code, message and hint; None if it can be enforced.
        until_s: `perf_counter` up to which this holds.
    """

    refusal: tuple[str, str, str] | None
    until_s: float = math.inf


class GrammarChecker:
    """Checks grammars for one model; threads and tasks may share it.

    Args:
        table: of the model's vocabulary.
        seconds: that compiling one grammar may take.
    """

    def __init__(self, table: TokenTable, *, seconds: float = LIMITS.max_grammar_seconds) -> None:
        self._seconds = seconds
        self._table = table
        program = ChildProgram(
            script=Path(__file__).with_name("grammar_worker.py"),
            packages=("tiercel", "llguidance", "numpy"),
            name="grammar",
            opening=self._vocabulary,
        )
        self._workers = ChildWorkers(program, NUM_WORKERS)
        self._lock = threading.Lock()
        self._kept: dict[bytes, _Verdict] = {}

    @property
    def num_kills(self) -> int:
        """Processes that were killed at the deadline or died of their limits."""
        return self._workers.num_kills

    def start(self) -> None:
        """Start the processes now, which takes up to a second each; else the first checks wait.

        Raises:
            InternalError: they cannot be started.
        """
        self._workers.start()

    async def check(self, spec: GrammarSpec) -> None:
        """As `check_now`, for a task."""
        if spec.digest in self._kept:
            self.check_now(spec)
        else:
            await asyncio.to_thread(self.check_now, spec)

    def check_now(self, spec: GrammarSpec) -> None:
        """Refuse a grammar that cannot be enforced.

        Raises:
            InvalidRequestError: code `invalid_schema`, or `schema_too_complex` if compiling it
                takes too long or too much memory.
            InternalError: no process can be started.
        """
        digest = spec.digest
        with self._lock:
            found = self._kept.pop(digest, None)
        if found is None or found.until_s < perf_counter():
            found = self._ask(spec)
        with self._lock:
            self._kept[digest] = found  # the newest is last
            while len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]
        if found.refusal is not None:
            raise refuse(*found.refusal)

    def close(self) -> None:
        """End the processes; a later check starts new ones."""
        self._workers.close()

    def _ask(self, spec: GrammarSpec) -> _Verdict:
        message = {"text": spec.text, "cpu_seconds": math.ceil(self._seconds) + 1}
        try:
            answer = self._workers.request(message, self._seconds)
        except WorkerLostError as error:
            spent = f"{self._seconds:g} s" if error.is_timeout else "the memory or time it may use"
            text = f"compiling the form takes more than {spent}."
            return _Verdict((TOO_COMPLEX, text, "Simplify it."), perf_counter() + LOST_SECONDS)
        if not answer:
            return _Verdict(None)
        return _Verdict((str(answer["code"]), str(answer["message"]), str(answer["hint"])))

    def _vocabulary(self) -> Mapping[str, object]:
        table = self._table
        return {
            "tokens": base64.b64encode(b"".join(table.tokens)).decode(),
            "lengths": [len(token) for token in table.tokens],
            "control_ids": table.control_ids,
            "stop_ids": table.stop_ids,
        }
