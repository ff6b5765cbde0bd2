"""What is said of a start, on a terminal and in a log, and what `/ready` says meanwhile."""

import asyncio
import logging

import pytest

from tests.patience import PATIENCE_S
from tests.serve.fake_client import FakeClient, fake_app, fake_info, fake_state, running
from tiercel.ipc.messages import EngineStats, Progress
from tiercel.serve.http.logs import set_up_logs
from tiercel.serve.lifecycle import engine_monitor
from tiercel.serve.lifecycle.engine_monitor import EngineMonitor
from tiercel.serve.lifecycle.throughput import Rates, Throughput
from tiercel.serve.startup_progress import StartupProgress

STEPS = [
    Progress("Fetching m (9 MB)", 0, 9, 0.0),
    Progress("Fetching m (9 MB)", 9, 9, 0.4),
    Progress("Loading PyTorch", 0, 0, 0.4),
    Progress("Loading", 1, 4, 0.6),
    Progress("Loading", 4, 4, 0.9),
]
ERASE = "\r\x1b[K"


def test_without_a_terminal_the_log_has_a_line_for_each_stage(caplog):
    caplog.set_level(logging.INFO, logger="tiercel")
    startup = StartupProgress(None)
    for step in STEPS:
        startup.on_progress(step)
    for done in range(4):
        startup.on_warmup(done, 3)
    startup.end()
    stages = [record.fields["stage"] for record in caplog.records]
    assert stages == ["Fetching m (9 MB)", "Loading PyTorch", "Loading", "Rehearsing requests"]


def test_a_terminal_gets_every_step_and_the_log_none(caplog):
    caplog.set_level(logging.INFO, logger="tiercel")
    shown = []
    startup = StartupProgress(shown.append)
    for step in STEPS:
        startup.on_progress(step)
    startup.on_warmup(1, 3)
    startup.end()
    assert shown == [
        "Fetching m (9 MB) 0%", "Fetching m (9 MB) 100%", "Loading PyTorch ...", "Loading 25%",
        "Loading 100%", "Rehearsing requests 33%", "",
    ]  # fmt: skip
    assert not caplog.records


def test_the_engine_and_the_rehearsal_share_the_progress():
    startup = StartupProgress(None)
    assert startup.progress(0.5) == pytest.approx(0.45)
    assert startup.progress(1.0) == pytest.approx(0.9)
    startup.on_warmup(1, 4)
    assert startup.progress(1.0) == pytest.approx(0.925)
    startup.on_warmup(4, 4)
    assert startup.progress(1.0) == pytest.approx(1.0)


def test_ready_tells_of_a_progress_that_only_rises():
    """The engine's own start is done; each request of the rehearsal finds the probe further on."""
    client = FakeClient(info=fake_info(max_model_len=1024, max_num_batched_tokens=1024))
    app = fake_app(client, warms_up=True)
    play, told = client.script, []

    def watched(request):
        told.append(app.state.server.progress)
        return play(request)

    client.script = watched

    async def start():
        async with running(app):
            pass

    asyncio.run(start())
    assert len(told) > 3
    assert told == sorted(set(told))
    assert 0.9 <= told[0] < told[-1] < 1


def test_progress_of_an_engine_that_is_started_again_is_its_own():
    async def probe():
        client = FakeClient()
        async with running(fake_app(client)) as http:
            client.state, client.progress = client.state.RESTARTING, 0.25
            return (await http.get("/ready")).json()

    assert asyncio.run(probe()) == {"status": "restarting", "progress": 0.25}


@pytest.fixture
def terminal(monkeypatch, capsys):
    """Reads what went to standard error."""
    monkeypatch.setenv("COLUMNS", "40")
    return lambda: capsys.readouterr().err


def test_log_lines_go_above_the_line_that_is_rewritten(terminal):
    show = set_up_logs(logging.INFO, "text")
    show("Loading 1%")
    show("Loading 2%")
    logging.getLogger("tiercel.serve").info("hello")
    show("")
    show("")
    logging.getLogger("tiercel.serve").info("ready")
    first, second, _ = terminal().split("\n")
    assert first.startswith(f"{ERASE}Loading 1%{ERASE}Loading 2%{ERASE}20")
    assert first.endswith(" INFO serve hello")
    assert second.startswith(f"{ERASE}Loading 2%{ERASE}20")
    assert second.endswith(" INFO serve ready")


def test_the_line_never_wraps_nor_steers_the_terminal(terminal):
    set_up_logs(logging.INFO, "text")("Fetching \x1b[2J" + 60 * "x")
    shown = terminal().removeprefix(ERASE)
    assert len(shown) == 39
    assert shown.startswith("Fetching \\x1b[2Jxx")


def stats(num_steps, num_prompt, num_generated):
    return EngineStats(
        num_steps=num_steps, num_prompt_tokens=num_prompt, num_generation_tokens=num_generated
    )


def test_rates_are_those_of_the_time_that_passed():
    throughput = Throughput(100.0)
    assert throughput.take(stats(1, 50, 0), 109.0, 10.0) is None
    assert throughput.take(stats(5, 200, 40), 120.0, 10.0) == Rates(prompt=10.0, generation=2.0)
    assert throughput.take(stats(5, 200, 40), 150.0, 10.0) is None  # nothing was done
    assert throughput.take(stats(7, 200, 65), 175.0, 10.0) == Rates(prompt=0.0, generation=1.0)


def test_a_new_engine_counts_from_zero():
    throughput = Throughput(0.0)
    throughput.take(stats(9, 900, 90), 10.0, 10.0)
    throughput.forget_engine()
    assert throughput.take(stats(2, 20, 10), 20.0, 10.0) == Rates(prompt=2.0, generation=1.0)
    assert throughput.take(stats(0, 0, 0), 30.0, 10.0) is None  # it has just died
    assert throughput.take(stats(1, 40, 0), 40.0, 10.0) == Rates(prompt=4.0, generation=0.0)


def test_no_throughput_line_tells_of_the_rehearsal(monkeypatch, caplog):
    """The clock passes an hour in the rehearsal; lines begin with what is asked after it."""
    caplog.set_level(logging.INFO, logger="tiercel")
    monkeypatch.setattr(engine_monitor, "_TICK_SECONDS", 0.001)
    client, now = FakeClient(), [0.0]
    state = fake_state(client, warms_up=True)
    is_warm = asyncio.Event()

    async def warm_up(*_):
        now[0] += 3600
        client.stats = stats(7, 1000, 100)
        await asyncio.sleep(0.02)
        client.stats = EngineStats()
        is_warm.set()

    monkeypatch.setattr(engine_monitor, "warm_up", warm_up)
    monitor = EngineMonitor(state, lambda state: None, lambda: now[0])

    async def use():
        monitor.start()
        await is_warm.wait()
        while state.model is None:
            await asyncio.sleep(0.001)
        client.stats = stats(3, 60, 6)
        now[0] += 20
        async with asyncio.timeout(PATIENCE_S):
            while not any(r.getMessage() == "throughput" for r in caplog.records):
                await asyncio.sleep(0.001)
        await monitor.stop()

    asyncio.run(use())
    state.close()
    (line,) = [record for record in caplog.records if record.getMessage() == "throughput"]
    assert line.fields["prompt_tokens_per_s"] == 3.0
    assert line.fields["generation_tokens_per_s"] == 0.3
