"""The supervisor of an engine process: notices its death, ends one that hangs, starts the next.

A process that hangs is found by its silence (`ipc/watchdog.py`). A death is answered by a new
process after a delay that doubles; too many deaths in too short a time end the attempts, and so
does a death after which the next process would end alike (`deaths.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter

from tiercel.errors import EngineDeadError
from tiercel.ipc.deaths import Deaths
from tiercel.ipc.messages import ErrorInfo, Failed, FromEngine, Log, Opened, Progress, Ready
from tiercel.ipc.siblings import OpenedFiles
from tiercel.ipc.spawn import OnMessage, StartedEngine
from tiercel.ipc.watchdog import Watchdog

_LOG = logging.getLogger(__name__)


class EngineState(StrEnum):
    """The state of the engine."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """When an engine counts as dead, and when the next one starts.

    Attributes:
        first_delay_s: before the first restart; each further one within the window waits twice as
            long as the one before.
        max_restarts: within the window; the death after them is the last.
        window_s: how long a restart is remembered.
        heartbeat_s: how long a step may go without an advance, at least; see `Watchdog`.
        exit_grace_s: how long a process whose socket is closed may take to end before it is killed.
    """

    first_delay_s: float = 1.0
    max_restarts: int = 5
    window_s: float = 600.0
    heartbeat_s: float = 60.0
    exit_grace_s: float = 5.0


class RestartPolicy:
    """Delays of restarts."""

    def __init__(self, settings: SupervisorSettings) -> None:
        self._settings = settings
        self._restarts: deque[float] = deque()

    def next_delay(self, now_s: float) -> float | None:
        """Seconds to wait after a death at `now_s`; None when there were too many."""
        while self._restarts and now_s - self._restarts[0] > self._settings.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._settings.max_restarts:
            return None
        self._restarts.append(now_s)
        return float(self._settings.first_delay_s * 2 ** (len(self._restarts) - 1))


class Supervisor:
    """One engine process at a time; all on one event loop.

    Attributes:
        name: name of the engine in the log.
        state: state of the engine.
        progress: share of this process's start that is done, 0 to 1; it never falls.
        num_restarts: processes started after the first.
    """

    def __init__(
        self,
        start: Callable[[OnMessage], Awaitable[StartedEngine]],
        settings: SupervisorSettings,
        on_message: Callable[[FromEngine], None],
        on_lost: Callable[[tuple[str, ...], EngineDeadError | None], None],
        is_busy: Callable[[], bool],
        files: OpenedFiles,
        name: str = "",
    ) -> None:
        """Set up; nothing is started.

        Args:
            start: starts a process.
            settings: see there.
            on_message: callback for each message of the engine.
            on_lost: called at each death with the requests that the engine named as suspects, and
                with the final error if there will be no other engine.
            is_busy: whether the engine has work, so that silence means that it hangs.
            files: files of the model, as they were opened first.
            name: name of the engine in the log if there are several.
        """
        self.state = EngineState.LOADING
        self.progress = 0.0
        self.num_restarts = 0
        self._start_engine = start
        self._settings = settings
        self._hear, self._tell_lost = on_message, on_lost
        self._watchdog = Watchdog(settings.heartbeat_s, is_busy)
        self._engine: StartedEngine | None = None
        self._deaths = Deaths(files)
        self.name = name or "the engine"
        self._policy = RestartPolicy(settings)
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._settled = asyncio.Event()  # ready, or there will be no engine any more

    @property
    def _prefix(self) -> str:
        """The name before each line of the engine's log, if there are several."""
        return "" if self.name == "the engine" else f"{self.name}: "

    @property
    def pid(self) -> int | None:
        """The engine process, or None while there is none."""
        return None if self._engine is None else self._engine.pid

    @property
    def failure(self) -> str | None:
        """Why the last process ended; None if none did."""
        return self._deaths.failure

    @property
    def final_error(self) -> EngineDeadError:
        """What clients are told once the engine is dead."""
        return self._deaths.final_error()

    @property
    def unsent_bytes(self) -> int:
        """What the engine has not yet read, as far as it did not fit into the socket."""
        return 0 if self._engine is None else self._engine.unsent_bytes

    def send(self, frame: bytes) -> None:
        """Send a frame to the engine; dropped if there is none."""
        if self._engine is not None:
            self._engine.send(frame)

    async def start(self) -> None:
        """Start the first process.

        Raises:
            EngineDeadError: no process can be made.
        """
        try:
            self._engine = await self._start_engine(self._on_message)
        except OSError as error:
            raise EngineDeadError(f"no engine process: {error.strerror}.") from None
        self._task = asyncio.create_task(self._supervise(self._engine))

    async def wait_ready(self) -> None:
        """Wait until an engine is ready.

        Raises:
            TiercelError: loading failed, or there will be no engine any more.
        """
        await self._settled.wait()
        if self.state is not EngineState.READY:
            why = (self.failure or "it was closed").rstrip(".")
            raise self._deaths.load_error() or EngineDeadError(f"there is no engine: {why}.")

    async def wait_ended(self) -> None:
        """Wait until there will be no engine any more: starting was given up, or `stop` called."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """End the engine and wait until it is gone; safe to call again."""
        self._stopping.set()
        if self._engine is not None:
            self._engine.close()
        await self.wait_ended()

    async def _supervise(self, engine: StartedEngine | None) -> None:
        while True:
            if engine is None:
                delay = self._policy.next_delay(perf_counter())
            else:
                delay = await self._live(engine)
            if delay is None and not self._stopping.is_set():
                self._give_up()
            if delay is None or await self._is_stopped_within(delay):
                self._settled.set()
                return
            engine = await self._start_again()

    async def _is_stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()

    async def _start_again(self) -> StartedEngine | None:
        self.num_restarts += 1
        self.progress = 0.0
        self._deaths.note_start()
        _LOG.warning("restart %d of %s", self.num_restarts, self.name)
        try:
            self._engine = await self._start_engine(self._on_message)
        except OSError as error:
            _LOG.error("no process for %s: %s", self.name, error.strerror)
        return self._engine

    def _give_up(self) -> None:
        self.state = EngineState.DEAD
        plural = "" if self.num_restarts == 1 else "s"
        _LOG.error(
            "%s is given up after %d restart%s: %s",
            self.name,
            self.num_restarts,
            plural,
            self.failure,
        )

    async def _live(self, engine: StartedEngine) -> float | None:
        """Watch a process until it is gone.

        Returns:
            Seconds until the next one is started; None if it is not.
        """
        if self._stopping.is_set():
            engine.close()
        watch = asyncio.create_task(self._watchdog.watch(engine))
        await engine.wait_lost()
        watch.cancel()
        is_wanted = self._stopping.is_set()
        self.state = EngineState.DRAINING if is_wanted else EngineState.RESTARTING
        self._settled.clear()
        # Readers that wait for tokens are notified before the process is cleaned up.
        self._engine = None
        self._deaths.note_loss()
        delay = self._policy.next_delay(perf_counter())
        is_final = (delay is None or self._deaths.is_hopeless) and not is_wanted
        if is_final:
            self.state = EngineState.DEAD
        suspects = () if engine.failed is None else engine.failed.suspects
        self._tell_lost(suspects, self.final_error if is_final else None)
        status = await engine.reap(self._settings.exit_grace_s)
        if is_wanted:
            return None
        died = ErrorInfo(EngineDeadError.__name__, _cause(status))
        self._deaths.note_cause(died if engine.failed is None else engine.failed.error)
        if is_final or self._deaths.is_hopeless:
            return None
        _LOG.error("%s process ended: %s", self.name, self.failure)
        return delay

    def _on_message(self, message: FromEngine) -> None:
        self._hear(message)
        self._watchdog.note(message)
        if isinstance(message, Progress):
            self.progress = message.share
        elif isinstance(message, Log):
            logging.getLogger(message.logger).log(message.level, "%s%s", self._prefix, message.text)
        elif isinstance(message, Failed):
            if message.detail:
                _LOG.error("%s failed: %s", self.name, message.detail)
        elif isinstance(message, Opened):
            if not self._deaths.note_files(message.files) and self._engine is not None:
                self._engine.kill()  # what changed is found when it is gone
        elif isinstance(message, Ready) and not self._stopping.is_set():
            self.state, self.progress = EngineState.READY, 1.0
            self._deaths.note_ready()
            self._settled.set()


def _cause(status: int) -> str:
    if status >= 0:
        return f"it ended with status {status}"
    return f"it was ended by signal {signal.Signals(-status).name}"
