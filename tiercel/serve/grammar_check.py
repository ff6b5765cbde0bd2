"""Checks at a bounded cost whether a grammar can be enforced, before the engine gets it.

Separate processes compile the grammars (`grammar_worker.py`). Verdicts are cached by the grammar's
hash. A verdict is one line of text, so a limit of 256 verdicts is enough. Compiled grammars are not
cached, because llguidance's copies share one budget of states.

As many grammars as there are processes are compiled together. Other grammars wait, at most
`MAX_WAITING` per client, and clients are served in turn: many slow grammars of one client delay
another client's grammar by one of them. Beyond `MAX_WAITING` a client gets 429 `queue_full`.
"""

from __future__ import annotations

import asyncio
import base64
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final

from tiercel.errors import QueueFullError
from tiercel.grammar.json_schema import refuse
from tiercel.grammar.matcher import TOO_COMPLEX, TokenTable
from tiercel.grammar.spec import GrammarSpec
from tiercel.ipc.fair_queue import FairQueue
from tiercel.params import LIMITS
from tiercel.serve.http.errors import overload_error
from tiercel.text.child_client import ChildProgram, ChildWorkers, WorkerLostError

MAX_VERDICTS: Final = 256
# A busy machine may have made a grammar slow: after this long the grammar is compiled again.
LOST_SECONDS: Final = 60.0
NUM_WORKERS: Final = 2
MAX_WAITING: Final = 64  # different grammars of one client


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Verdict on a grammar.

    Attributes:
        refusal: code, message and hint of the error; None if the grammar can be enforced.
        until_s: `perf_counter` until which the verdict is valid.
    """

    refusal: tuple[str, str, str] | None
    until_s: float = math.inf

    def raise_refusal(self) -> None:
        """Raise the error, if there is one.

        Raises:
            InvalidRequestError: the grammar cannot be enforced.
        """
        if self.refusal is not None:
            raise refuse(*self.refusal)


@dataclass(slots=True, eq=False)
class _Check:
    """A grammar that waits for a process or is compiled; tasks of its client share it.

    Attributes:
        spec: the grammar.
        num_tasks: number of tasks that wait for the verdict.
        has_ended: event that is set when `work` is done.
        work: future of the compilation; None while the grammar waits.
    """

    spec: GrammarSpec
    num_tasks: int = 0
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    work: asyncio.Future[_Verdict] | None = None


class GrammarChecker:
    """Checker of grammars for one model, shared by the tasks of one event loop.

    Args:
        table: token table of the model's vocabulary.
        seconds: time limit of compiling one grammar.
        max_wait_s: time limit of a task's wait for a verdict.
    """

    def __init__(
        self,
        table: TokenTable,
        *,
        seconds: float = LIMITS.max_grammar_seconds,
        max_wait_s: float = LIMITS.max_queue_seconds,
    ) -> None:
        self._seconds = seconds
        self._max_wait_s = max_wait_s
        self._table = table
        program = ChildProgram(
            script=Path(__file__).with_name("grammar_worker.py"),
            packages=("tiercel", "llguidance", "numpy"),
            name="grammar",
            opening=self._vocabulary,
        )
        self._workers = ChildWorkers(program, NUM_WORKERS)
        self._lock = threading.Lock()
        self._verdicts: dict[bytes, _Verdict] = {}
        self._waiting: FairQueue[_Check] = FairQueue()
        self._checks: dict[tuple[str, bytes], _Check] = {}  # by client and digest
        self._num_running = 0

    @property
    def num_kills(self) -> int:
        """Processes that were killed at the time limit or died of their memory limit."""
        return self._workers.num_kills

    def start(self) -> None:
        """Start the processes now, which takes up to a second each; else the first checks do.

        Raises:
            InternalError: a process cannot be started.
        """
        self._workers.start()

    async def check(self, spec: GrammarSpec, client: str) -> None:
        """Check a grammar as `check_now` does, but without blocking, and in `client`'s turn.

        Raises:
            QueueFullError: 429, too many grammars of this client wait; 503 `queue_timeout`, its
                turn did not come in time.
        """
        if spec.digest in self._verdicts:
            self.check_now(spec)
            return
        check = self._join(spec, client)
        check.num_tasks += 1
        try:
            async with asyncio.timeout(self._max_wait_s):
                await check.has_ended.wait()
        except TimeoutError:
            text = f"No grammar process became free in {self._max_wait_s:g} seconds."
            raise overload_error("queue_timeout", text, 30) from None
        finally:
            check.num_tasks -= 1
            if not check.num_tasks and check.work is None:
                self._waiting.remove(client, check)
                del self._checks[client, spec.digest]
        assert check.work is not None, "it has ended"
        check.work.result().raise_refusal()

    def _join(self, spec: GrammarSpec, client: str) -> _Check:
        """The check of a grammar that this client waits for already, or a new one."""
        found = self._checks.get((client, spec.digest))
        if found is not None:
            return found
        if self._waiting.count(client) >= MAX_WAITING:
            error = QueueFullError(
                f"{MAX_WAITING} grammars of this client wait to be compiled, the limit.",
                hint="Send it again later.",
            )
            error.retry_after_s = math.ceil(self._seconds)
            raise error
        check = self._checks[client, spec.digest] = _Check(spec)
        self._waiting.put(client, check)
        # Later, when the task waits: a check that ends before that would be missed.
        asyncio.get_running_loop().call_soon(self._start_checks)
        return check

    def _start_checks(self) -> None:
        while self._num_running < NUM_WORKERS and (check := self._waiting.take()) is not None:
            self._num_running += 1
            loop = asyncio.get_running_loop()
            check.work = loop.run_in_executor(None, self._find, check.spec)
            check.work.add_done_callback(partial(self._on_found, check))

    def _on_found(self, check: _Check, work: asyncio.Future[_Verdict]) -> None:
        if not work.cancelled():
            work.exception()  # for the tasks, if any are left; else nothing is lost
        self._checks = {key: other for key, other in self._checks.items() if other is not check}
        self._num_running -= 1
        check.has_ended.set()
        self._start_checks()

    def check_now(self, spec: GrammarSpec) -> None:
        """Refuse a grammar that cannot be enforced.

        Raises:
            InvalidRequestError: code `invalid_schema`, or `schema_too_complex` if compiling it
                takes too long or too much memory.
            InternalError: no process can be started.
        """
        self._find(spec).raise_refusal()

    def _find(self, spec: GrammarSpec) -> _Verdict:
        """The cached verdict on a grammar, or a new one."""
        digest = spec.digest
        with self._lock:
            found = self._verdicts.pop(digest, None)
        if found is None or found.until_s < perf_counter():
            found = self._ask(spec)
        with self._lock:
            self._verdicts[digest] = found  # the newest is last
            while len(self._verdicts) > MAX_VERDICTS:
                del self._verdicts[next(iter(self._verdicts))]
        return found

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
