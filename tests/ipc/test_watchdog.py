"""When an engine counts as dead and when the next one starts, by a clock of the test's own."""

import asyncio
import logging
import random
from functools import partial
from types import SimpleNamespace

import pytest

from tiercel.config import LoadOptions
from tiercel.ipc import watchdog as watchdog_module
from tiercel.ipc.messages import (
    Advanced,
    EngineStats,
    ErrorInfo,
    Failed,
    Log,
    Outputs,
    Progress,
    Stats,
)
from tiercel.ipc.siblings import OpenedFiles
from tiercel.ipc.spawn import start_engine
from tiercel.ipc.supervisor import (
    EngineState,
    RestartPolicy,
    Supervisor,
    SupervisorSettings,
    _cause,
)
from tiercel.ipc.watchdog import Watchdog

TICKS = 10  # in which the least time of a watchdog is counted


def make_supervisor(settings=None, is_busy=lambda: True):
    heard = []
    made = Supervisor(
        partial(start_engine, LoadOptions()),
        settings or SupervisorSettings(),
        heard.append,
        lambda *_: None,
        is_busy,
        OpenedFiles(),
    )
    return made, heard


@pytest.mark.parametrize("seed", range(20))
def test_delays_follow_the_restarts_of_the_last_window(seed):
    draw = random.Random(seed)
    settings = SupervisorSettings(
        first_delay_s=draw.choice((0.5, 3.0)), max_restarts=draw.randrange(5),
        window_s=draw.choice((10.0, 40.0)),
    )  # fmt: skip
    policy, restarts, now = RestartPolicy(settings), [], 0.0
    for _ in range(40):
        now += draw.choice((0.0, 1.0, 10.0, 11.0))
        recent = [then for then in restarts if then >= now - settings.window_s]
        if len(recent) == settings.max_restarts:
            assert policy.next_delay(now) is None
            continue
        expected = settings.first_delay_s
        for _ in recent:
            expected += expected
        assert policy.next_delay(now) == expected
        restarts.append(now)


class FakeEngine:
    """Hears what is done to it."""

    def __init__(self):
        self.calls = []

    def dump_stacks(self):
        self.calls.append("stacks")

    def give_up(self, why):
        self.calls.append(str(why))


SIGNS = (Outputs(0.0, 0, (), ()), Stats(EngineStats()), Advanced(0.1))


@pytest.mark.parametrize("seed", range(8))
def test_silence_counts_only_without_a_pause_and_while_there_is_work(monkeypatch, seed):
    """Random signs of life and idle times; the engine is killed at the tenth silent tick in row."""
    draw, slept, busy = random.Random(seed), [], [False]
    made, _ = make_supervisor(SupervisorSettings(heartbeat_s=7.0), lambda: busy[0])
    engine, silent, expected = FakeEngine(), 0, []

    async def sleep(seconds):
        nonlocal silent
        slept.append(seconds)
        if seconds != 0.7:
            return
        assert len(slept) < 3000
        is_sign = draw.random() < 0.1
        busy[0] = draw.random() < 0.95
        if is_sign:
            made._on_message(draw.choice(SIGNS))
        elif draw.random() < 0.5:  # no sign: others than the step loop send these
            made._on_message(draw.choice((Progress("x", 1, 2, 0.5), Log(20, "x", "y"))))
        silent = 0 if is_sign or not busy[0] else silent + 1
        if silent == TICKS:
            expected.append(len(slept))

    monkeypatch.setattr(watchdog_module.asyncio, "sleep", sleep)
    asyncio.run(made._watchdog.watch(engine))
    assert [len(slept) - 1] == expected, "one sleep more, for the stacks"
    assert engine.calls == ["stacks", "no progress in 7 s while there was work"]


def silent_ticks_until_killed(monkeypatch, watchdog):
    engine, slept = FakeEngine(), []

    async def sleep(seconds):
        slept.append(seconds)
        assert len(slept) < 10000

    monkeypatch.setattr(watchdog_module.asyncio, "sleep", sleep)
    asyncio.run(watchdog.watch(engine))
    return len(slept) - 1, engine.calls[-1]


def test_the_patience_with_an_engine_follows_its_speed(monkeypatch):
    """20 times the longest pause of late, and never less than the least time."""
    watchdog = Watchdog(2.0, lambda: True)
    assert silent_ticks_until_killed(monkeypatch, watchdog)[0] == TICKS
    for pause_s in (0.01, 0.5, 0.2):
        watchdog.note(Advanced(pause_s))
    assert silent_ticks_until_killed(monkeypatch, watchdog) == (
        5 * TICKS, "no progress in 10 s while there was work",
    )  # fmt: skip
    for _ in range(31):
        watchdog.note(Advanced(0.11))
    assert watchdog.limit_s == pytest.approx(4.0), "0.5 s are forgotten, 0.2 s are not"
    watchdog.note(Advanced(0.0))
    assert watchdog.limit_s == pytest.approx(2.2)
    for _ in range(32):
        watchdog.note(Advanced(0.05))
    assert watchdog.limit_s == 2.0


def test_a_step_that_advances_may_last_for_ever(monkeypatch):
    watchdog, engine, signs = Watchdog(2.0, lambda: True), FakeEngine(), []

    async def sleep(seconds):
        signs.append(seconds)
        if len(signs) < 1000 and len(signs) % 9 == 0:
            watchdog.note(Advanced(0.0))

    monkeypatch.setattr(watchdog_module.asyncio, "sleep", sleep)
    asyncio.run(watchdog.watch(engine))
    assert len(signs) - 1 == 999 + TICKS, "the last sign came with the 999th tick"


def test_progress_is_a_share():
    made, heard = make_supervisor()
    told = []
    for share in (0.0, 0.375, 1.0):
        made._on_message(Progress("Loading", 1, 8, share))
        told.append(made.progress)
    assert told == [0.0, 0.375, 1.0]
    assert len(heard) == 3


def test_lines_of_the_engine_go_to_the_log_at_their_level(caplog):
    made, _ = make_supervisor()
    with caplog.at_level(logging.INFO):
        made._on_message(Log(logging.WARNING, "tiercel.x", "100% %s"))
        made._on_message(Failed(ErrorInfo("InternalError", "why"), "trace"))
        made._on_message(Failed(ErrorInfo("InternalError", "why")))
    lines = [(r.name, r.levelno, r.getMessage()) for r in caplog.records]
    assert lines[0] == ("tiercel.x", logging.WARNING, "100% %s")
    assert [line[2] for line in lines[1:]] == ["the engine failed: trace"]


def test_a_status_is_told_in_words():
    assert _cause(0) == "it ended with status 0"
    assert _cause(3) == "it ended with status 3"
    assert _cause(-9) == "it was ended by signal SIGKILL"
    assert _cause(-1) == "it was ended by signal SIGHUP"


def test_nothing_is_sent_without_an_engine():
    made, _ = make_supervisor()
    made.send(b"x")
    assert (made.pid, made.unsent_bytes, made.state) == (None, 0, EngineState.LOADING)
    sent = []
    made._engine = SimpleNamespace(send=sent.append, pid=7, unsent_bytes=3)
    made.send(b"x")
    assert (made.pid, made.unsent_bytes, sent) == (7, 3, [b"x"])
