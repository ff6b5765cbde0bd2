"""The other ranks of a model, as rank 0 sees them: their start, their life and their failure.

Rank 0 is the process that answers: the engine process, or that of an `LLM`. It starts the others as
the supervisor starts it (`spawn.py`) and speaks with each over a socket pair of its own; ranks of
other hosts knock at a port instead (`meeting.py`). A socket and not a broadcast of PyTorch: the
kernel shows the death of a rank at once, a message waits for nobody, and no step of rank 0 depends
on how far another rank has come. Tensors alone go through collectives (`parallel.py`).

One thread starts the processes (the kernel ends them with that thread), reads what they send and
watches them. A rank that ends, that is silent for `SILENT_S` in a step, or that computed other
tokens than rank 0 is the end of all: the others are killed, and rank 0 is told.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Final

import torch
from torch import distributed as dist

from tiercel import env
from tiercel.config import LoadOptions
from tiercel.engine.engine import Engine
from tiercel.engine.load import LoadedModel, Report, load_model, open_model, resolve_config, settled
from tiercel.engine.peers import OnFailure
from tiercel.engine_config import EngineConfig
from tiercel.errors import ArgumentError, EngineDeadError, RankLostError, TiercelError
from tiercel.ipc.knock import Listener
from tiercel.ipc.lockstep import LeadingEngine, LeadingMatchers
from tiercel.ipc.meeting import Meeting, RankProcess
from tiercel.ipc.messages import Failed, FrameReader, Join, Log, encode
from tiercel.ipc.rank_messages import (
    MAX_FROM_RANK_BYTES,
    Agreed,
    Alive,
    Begin,
    FromRank,
    ToRank,
    Value,
    Word,
    decode_from_rank,
    encode_frame,
)
from tiercel.models.source import ModelSource
from tiercel.ops.all_reduce import make_small_all_reduce
from tiercel.parallel import SINGLE, Group, connect
from tiercel.runner.runner import ModelRunner
from tiercel.scheduler.joint import AnyScheduler
from tiercel.text.tokenizer import Tokenizer

_LOG: Final = logging.getLogger(__name__)

SILENT_S: Final = 30.0  # of a rank with a step to do: then it hangs
TICK_S: Final = 1.0  # in which silence is counted
_REAP_S: Final = 2.0  # for a process to end after its socket
_STATUS_S: Final = 0.5  # for its exit status to be known then
_NOTICE_S: Final = 1.0  # until the death of a rank shows, after a collective has failed
_STACKS_S: Final = 0.2  # for the stacks of a rank that hangs to reach the log
_CHUNK_BYTES: Final = 1 << 16


def load_several(
    model: str | Path | ModelSource | None,
    options: LoadOptions,
    report: Report | None,
    on_failure: OnFailure | None,
    listener: Listener | None = None,
) -> LoadedModel:
    """Load a model on two ranks or more; see `load_ranks`."""
    source = open_model(model, options, report)
    config = resolve_config(source, options)
    if dist.is_initialized():
        raise ArgumentError(
            "this process has a model on several ranks already.", hint="Close that one first."
        )
    options = settled(source, options, config)
    _LOG.info("%d ranks: %s", config.tensor_parallel_size, _devices(config, options.ranks_per_host))
    ranks = Ranks(options, on_failure, listener)
    try:
        return load_model(source, options, report, ranks)
    except BaseException as error:
        ranks.give_up(error)
        raise


def _devices(config: EngineConfig, per_host: int) -> str:
    """The devices of all ranks."""
    if per_host:
        return f"{per_host} on each host"
    if config.device.type == "cpu":
        return "CPU processes, for tests"
    first = config.device.index or 0
    last = first + config.tensor_parallel_size - 1
    what = ", whole experts each" if config.expert_parallel else ""
    what += ", requests of its own" if config.data_parallel_attention else ""
    return f"cuda:{first} to cuda:{last}{what}"


@dataclass(slots=True)
class _Other:
    """One other rank.

    Attributes:
        rank: from 1.
        process: its process.
        connection: our end of its socket pair.
        reader: cuts what it sends into frames.
        answers: values it has sent; None: there will be none.
        said: what it said when it ended.
        num_steps: steps that it has finished.
        num_silent: ticks since it last advanced, with a step to do.
    """

    rank: int
    process: RankProcess
    connection: socket.socket
    reader: FrameReader = field(default_factory=lambda: FrameReader(MAX_FROM_RANK_BYTES))
    answers: SimpleQueue[Value | None] = field(default_factory=SimpleQueue)
    said: Failed | None = None
    num_steps: int = 0
    num_silent: int = 0


class _Words:
    """Check words by number of steps and rank, until those of all ranks are in."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._words: dict[int, dict[int, int]] = {}

    def add(self, rank: int, num_steps: int, word: int) -> str | None:
        """Add a word; the last one of a step finds out whether they differ, and how."""
        with self._lock:
            words = self._words.setdefault(num_steps, {})
            words[rank] = word
            if len(words) < self._size:
                return None
            del self._words[num_steps]
        wrong = next((other for other in sorted(words) if words[other] != words[0]), None)
        if wrong is None:
            return None
        return (
            f"rank {wrong} computed other tokens than rank 0: after {num_steps} steps its check "
            f"word is {words[wrong]:#x}, that of rank 0 is {words[0]:#x}."
        )


def join_group(rank: int, size: int, device: torch.device, address: str) -> Group:
    """Connect a rank with all others, and see that tensors pass between them.

    Raises:
        RankLostError: they do not.
    """
    if device.type == "cuda":
        env.forbid_multicast()
        env.forbid_nccl_monitor()
    group = connect(rank, size, device, address)
    if device.type == "cuda" and group.processes is not None and address.startswith("file:"):
        small_sums = make_small_all_reduce(group.processes, device)
        if isinstance(small_sums, str):
            _LOG.info("NCCL adds small tensors too: %s.", small_sums)
        else:
            group = replace(group, small_sums=small_sums)
    total = group.all_reduce(torch.ones(1, device=device)).item()
    if total != size:
        raise RankLostError(f"rank {rank}: ones of {size} ranks add up to {total}.")
    return group


class Ranks:
    """All other ranks of a model; see `Peers` and `Audience` for what loading and steps use."""

    rank: Final = 0

    def __init__(
        self,
        options: LoadOptions,
        on_failure: OnFailure | None,
        listener: Listener | None = None,
    ) -> None:
        """Start their processes.

        Args:
            options: those of `settled`.
            on_failure: see `load_ranks`.
            listener: see `load_ranks`.

        Raises:
            EngineDeadError: a process cannot be started.
        """
        self.failure: EngineDeadError | None = None
        self._cause: TiercelError | None = None  # of the failure, in the words of another rank
        self._on_failure = on_failure
        self._size = options.tensor_parallel_size
        self._meeting = Meeting(self._size, listener, options.ranks_per_host)
        self.group = SINGLE
        self._others: list[_Other] = []
        self._lock = threading.Lock()  # frames of several threads follow each other whole
        self._words = _Words(self._size)
        self._pid = os.getpid()
        self._num_steps = 0
        self._has_begun = self._is_closing = False
        self._has_failed = threading.Event()
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._live, args=(options, started), name="ranks", daemon=True
        )
        self._thread.start()
        try:
            started.result()
        except OSError as error:
            self.close()
            raise EngineDeadError(f"a rank cannot be started: {error.strerror}.") from None
        except EngineDeadError:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids, from rank 1 on."""
        return [other.process.pid for other in self._others]

    def check(self, facts: Mapping[str, str]) -> None:
        """Compare facts; see `Peers`. Each rank waits for the answer before it loads."""
        for other in self._others:
            theirs = self._answer(other, "facts").facts
            for name in facts.keys() | theirs.keys():
                mine, its = facts.get(name, "none"), theirs.get(name, "none")
                if mine != its:
                    raise ArgumentError(
                        f"rank {other.rank} differs from rank 0 in {name}: {its}, not {mine}.",
                        hint="All ranks must run the same code on the same files and GPUs.",
                    )
        self._send(Agreed("facts"))

    def connect(self, device: torch.device) -> None:
        """See `Peers`."""
        self.group = join_group(0, self._size, device, self._meeting.address)

    def least(self, what: str, value: int) -> int:
        """See `Peers`."""
        every = [int(self._answer(other, what).values[0]) for other in self._others]
        agreed = min(value, *every)
        self._send(Agreed(what, (agreed,)))
        return agreed

    def first(self, what: str, values: Sequence[float]) -> list[float]:
        """See `Peers`."""
        for other in self._others:
            self._answer(other, what)
        self._send(Agreed(what, tuple(values)))
        return list(values)

    def engine(self, scheduler: AnyScheduler, runner: ModelRunner, config: EngineConfig) -> Engine:
        """See `Peers`."""
        return LeadingEngine(scheduler, runner, config, self)

    def matchers(self, tokenizer: Tokenizer, vocab_size: int) -> LeadingMatchers:
        """See `Peers`."""
        return LeadingMatchers(tokenizer, vocab_size, self)

    def begin(self) -> None:
        """See `Peers`."""
        self._meeting.close()
        self._has_begun = True
        self._send(Begin())

    def close(self) -> None:
        """See `Peers`."""
        if os.getpid() != self._pid:  # a fork shares the sockets, but they are not its own
            return
        self._is_closing = True
        for other in self._others:
            with contextlib.suppress(OSError):
                other.connection.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.group.close()
        self.group = SINGLE
        self._meeting.close()

    def send(self, frames: bytes) -> None:
        """Send frames to every rank; see `Audience`."""
        with self._lock:
            for other in self._others:
                # Where a rank is gone, the thread that reads notes it.
                with contextlib.suppress(OSError):
                    other.connection.sendall(frames)

    def note_step(self) -> None:
        """See `Audience`."""
        self._num_steps += 1

    def note_word(self, rank: int, num_steps: int, word: int) -> None:
        """See `Audience`."""
        different = self._words.add(rank, num_steps, word)
        if different is not None:
            self._fail(EngineDeadError(different))

    def give_up(self, error: BaseException) -> None:
        """End all ranks after an error of rank 0; see `Audience`."""
        is_explained = isinstance(error, TiercelError | torch.OutOfMemoryError)
        is_explained &= not isinstance(error, RankLostError)
        if not is_explained and isinstance(error, Exception):
            self._has_failed.wait(_NOTICE_S)  # it may follow from the death of another rank
        failure = self._cause or self.failure
        if self.failure is None:
            self.failure = EngineDeadError(f"rank 0 failed: {type(error).__name__}.")
        self._kill()  # they may wait for rank 0 in a collective
        self.close()
        if failure is not None and not is_explained:
            raise failure from error

    def _send(self, message: ToRank) -> None:
        self.send(encode_frame(message))

    def _answer(self, other: _Other, what: str) -> Value:
        """Wait for a value of a rank."""
        value = None if self.failure is not None else other.answers.get()
        if value is None:
            assert self.failure is not None, "answers end with a failure"
            raise self._cause or self.failure
        assert value.what == what, "all ranks agree on the same things in the same order"
        return value

    def _live(self, options: LoadOptions, started: Future[None]) -> None:
        """Start the ranks, then hear and watch them until they are gone; on the thread."""
        try:
            for rank in range(1, self._size):
                process, ours = self._meeting.start(rank)
                self._others.append(_Other(rank, process, ours))
                ours.sendall(encode(Join(options, rank, self._meeting.address)))
        except (OSError, EngineDeadError) as error:
            started.set_exception(error)
        else:
            started.set_result(None)
            self._watch()
        self._reap()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for other in self._others:
                selector.register(other.connection, selectors.EVENT_READ, other)
            ticked_s = perf_counter()
            while self.failure is None and not self._is_closing:
                for key, _ in selector.select(TICK_S):
                    self._read(key.data)
                # Ticks are counted, not seconds: while all processes are stopped, none hangs.
                if perf_counter() - ticked_s >= TICK_S:
                    ticked_s = perf_counter()
                    self._count_silence()

    def _read(self, other: _Other) -> None:
        try:
            data = other.connection.recv(_CHUNK_BYTES)
        except OSError:  # one that was killed with unread data resets the connection
            data = b""
        if not data:
            self._lose(other)
            return
        try:
            for body in other.reader.feed(data):
                self._hear(other, decode_from_rank(body))
        except EngineDeadError as error:
            self._fail(EngineDeadError(f"rank {other.rank} cannot be understood: {error}"))

    def _hear(self, other: _Other, message: FromRank) -> None:
        other.num_silent = 0
        if isinstance(message, Value):
            other.answers.put(message)
        elif isinstance(message, Alive):
            other.num_steps = message.num_steps
        elif isinstance(message, Word):
            self.note_word(other.rank, message.num_steps, message.word)
        elif isinstance(message, Failed):
            other.said = message
        else:
            assert isinstance(message, Log)
            logging.getLogger(message.logger).log(
                message.level, "rank %d: %s", other.rank, message.text
            )

    def _count_silence(self) -> None:
        for other in self._others:
            is_behind = self._has_begun and other.num_steps < self._num_steps
            other.num_silent = other.num_silent + 1 if is_behind else 0
            if other.num_silent * TICK_S >= SILENT_S:
                with contextlib.suppress(ProcessLookupError):
                    other.process.send_signal(signal.SIGUSR1)  # it writes its stacks
                threading.Event().wait(_STACKS_S)
                self._fail(EngineDeadError(f"rank {other.rank} hung for {SILENT_S:.3g} s."))
                return

    def _lose(self, other: _Other) -> None:
        """A rank has closed its socket, which it does by ending."""
        if self._is_closing:
            return
        if other.said is not None:
            if other.said.detail:
                _LOG.error("rank %d failed: %s", other.rank, other.said.detail)
            if not self._has_begun:  # it may explain a fault of the model or the options
                self._cause = other.said.error.error()
            self._fail(EngineDeadError(f"rank {other.rank} failed: {other.said.error.message}"))
            return
        try:
            status = other.process.wait(_STATUS_S)
        except subprocess.TimeoutExpired:
            how = "closed its socket"
        else:
            named = f"was ended by signal {signal.Signals(-status).name}" if status < 0 else ""
            how = named or f"ended with status {status}"
        self._fail(EngineDeadError(f"rank {other.rank} {how}."))

    def _fail(self, error: EngineDeadError) -> None:
        """End all ranks, and let rank 0 know."""
        if self.failure is not None or self._is_closing:
            return
        _LOG.error("%s The other ranks end too.", error)
        self.failure = error
        self._kill()
        self._wait(_STATUS_S)
        for other in self._others:
            other.answers.put(None)
        if self.group.processes is not None and torch.cuda.is_available():
            self.group.processes.abort()  # what waits on this GPU for a lost rank ends
        self._has_failed.set()
        if self._on_failure is not None:
            self._on_failure(self._cause or error)

    def _kill(self) -> None:
        for other in self._others:
            other.process.kill()

    def _wait(self, seconds: float) -> None:
        """Wait until all processes are gone, or not any longer."""
        deadline = perf_counter() + seconds
        for other in self._others:
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.process.wait(max(0.0, deadline - perf_counter()))

    def _reap(self) -> None:
        """Wait until all processes are gone; they end with their sockets."""
        self._wait(_REAP_S)
        self._kill()
        for other in self._others:
            other.process.wait()
            other.connection.close()
