"""The process of another rank than 0: it loads the same model, then does what rank 0 does.

The thread that computes reads the socket itself: it has nothing to do but what rank 0 sends. While
it computes, the kernel ends it with the thread of rank 0 that started it (`spawn.py`).
"""

from __future__ import annotations

import gc
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from time import perf_counter
from typing import Final, NoReturn

import torch

from tiercel import env
from tiercel.engine.engine import Engine
from tiercel.engine.load import load_model
from tiercel.engine_config import EngineConfig
from tiercel.faults import Faults
from tiercel.grammar.matcher import MAX_MASK_SECONDS
from tiercel.grammar.matchers import Matchers
from tiercel.ipc.last_words import LinkHandler, describe_failure, leave
from tiercel.ipc.lockstep import Follower, SpareMatchers
from tiercel.ipc.messages import MAX_TO_ENGINE_BYTES, FrameReader, Join
from tiercel.ipc.rank_messages import (
    Agreed,
    Alive,
    FromRank,
    ToRank,
    Value,
    Word,
    decode_to_rank,
    encode_frame,
)
from tiercel.ipc.ranks import join_group
from tiercel.parallel import SINGLE
from tiercel.runner.runner import ModelRunner
from tiercel.scheduler.joint import AnyScheduler
from tiercel.text.tokenizer import Tokenizer

_IDLE_S: Final = 0.2  # without a message, after which the steps that are done are reported
_ALIVE_S: Final = 1.0  # between two reports within steps
_CHUNK_BYTES: Final = 1 << 18


class RankLink:
    """This rank's end of the socket pair."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader(MAX_TO_ENGINE_BYTES)
        self._lock = threading.Lock()  # a thread that compiles may log
        self._bodies: deque[bytearray] = deque()

    def send(self, message: FromRank) -> None:
        """Send a message; ends the process if rank 0 is gone."""
        frame = encode_frame(message)
        try:
            with self._lock:
                self._connection.sendall(frame)
        except OSError:
            leave()

    def is_silent(self, seconds: float) -> bool:
        """Whether no message comes for some time."""
        return not self._bodies and not select.select([self._connection], [], [], seconds)[0]

    def receive(self) -> ToRank:
        """Wait for the next message; ends the process if there will be none."""
        while not self._bodies:
            try:
                data = self._connection.recv(_CHUNK_BYTES)
            except OSError:
                data = b""
            if not data:
                leave()
            self._bodies.extend(self._reader.feed(data))
        return decode_to_rank(self._bodies.popleft())


class FollowingRank:
    """The other ranks, as this one sees them: rank 0; see `Peers`."""

    def __init__(self, link: RankLink, join: Join) -> None:
        self.rank = join.rank
        self.group = SINGLE
        self._link = link
        self._size = join.options.tensor_parallel_size
        self._address = join.address
        self._has_own_requests = join.options.data_parallel_attention

    def check(self, facts: Mapping[str, str]) -> None:
        """See `Peers`; rank 0 compares."""
        self._ask(Value("facts", facts=dict(facts)))

    def connect(self, device: torch.device) -> None:
        """See `Peers`."""
        self.group = join_group(self.rank, self._size, device, self._address)

    def least(self, what: str, value: int) -> int:
        """See `Peers`."""
        return int(self._ask(Value(what, (value,)))[0])

    def first(self, what: str, values: Sequence[float]) -> list[float]:
        """See `Peers`."""
        return list(self._ask(Value(what, tuple(values))))

    def engine(self, scheduler: AnyScheduler, runner: ModelRunner, config: EngineConfig) -> Engine:
        """See `Peers`."""
        return Engine(scheduler, runner, config)

    def matchers(self, tokenizer: Tokenizer, vocab_size: int) -> Matchers:
        """See `Peers`; rank 0 alone refuses a grammar by the clock, and ends its own requests."""
        max_mask_s = MAX_MASK_SECONDS if self._has_own_requests else inf
        return Matchers(tokenizer, vocab_size, max_mask_s, max_first_s=inf)

    def begin(self) -> None:
        """Rank 0 says when it begins."""

    def close(self) -> None:
        """Rank 0 ends this one."""

    def _ask(self, value: Value) -> tuple[float, ...]:
        self._link.send(value)
        answer = self._link.receive()
        assert isinstance(answer, Agreed) and answer.what == value.what, "ranks agree in one order"  # noqa: PT018
        return answer.values


def follow(connection: socket.socket, join: Join) -> NoReturn:
    """Load a model and follow rank 0 until it closes the socket."""
    link = RankLink(connection)
    # What rank 0 says too need not be said by every rank.
    logging.basicConfig(level=logging.WARNING, handlers=[LinkHandler(link.send)], force=True)
    logging.captureWarnings(capture=True)
    try:
        _run(link, join)
    except Exception as error:  # noqa: BLE001 - whatever it was, rank 0 must be told
        link.send(describe_failure(error))
    os._exit(1)


def _run(link: RankLink, join: Join) -> NoReturn:
    options = join.options
    faults = Faults.parse(env.faults(), is_enabled=options.enable_fault_injection, rank=join.rank)
    faults.at_start()
    loaded = load_model(options.model, options, None, FollowingRank(link, join))
    gc.freeze()
    follower = Follower(
        loaded.engine,
        SpareMatchers(loaded.matchers),
        faults,
        lambda num_steps, word: link.send(Word(num_steps, word)),
    )
    signs = _Signs(link, follower)
    loaded.engine.runner.watch(signs)
    while True:
        if link.is_silent(_IDLE_S):
            signs.report()
        message = link.receive()
        assert not isinstance(message, Agreed), "loading is over"
        follower.take(message)
        signs()


class _Signs:
    """Tells rank 0 that the thread that computes advances."""

    def __init__(self, link: RankLink, follower: Follower) -> None:
        self._link, self._follower = link, follower
        self._sent_s = 0.0
        self._sent_steps = 0

    def __call__(self) -> None:
        """Note that it has advanced."""
        if perf_counter() - self._sent_s >= _ALIVE_S:
            self._send()

    def report(self) -> None:
        """Tell which steps are done, before waiting for the next."""
        if self._follower.num_steps > self._sent_steps:
            self._send()

    def _send(self) -> None:
        self._sent_s, self._sent_steps = perf_counter(), self._follower.num_steps
        self._link.send(Alive(self._sent_steps))
