"""Who waits for a place in the engine, and how long that takes, without an engine."""

import random
from types import SimpleNamespace

import pytest

from tests.engine_process import make_client
from tests.ipc.test_client import fake_info
from tiercel.errors import EngineDeadError, QueueFullError
from tiercel.ipc import client as client_module
from tiercel.ipc.client import MAX_UNSENT_BYTES
from tiercel.ipc.messages import Delta, Entered, Outputs, Ready
from tiercel.ipc.supervisor import EngineState
from tiercel.params import SamplingParams
from tiercel.request.request import Request


def open_queue(max_waiting, max_num_seqs):
    client = make_client(max_waiting=max_waiting)
    client._on_message(Ready(fake_info(max_num_seqs=max_num_seqs)))
    client._supervisor.state = EngineState.READY
    return client


def make_request():
    return Request("r", [1], SamplingParams(), 0, 0, frozenset(), 8)


@pytest.mark.parametrize("seed", range(10))
def test_the_queue_counts_as_a_plain_list_does(seed):
    """Arrivals, entries, ends and aborts in any order; `known`: the newest that the engine saw."""
    draw = random.Random(seed)
    places, most = draw.randrange(1, 4), draw.randrange(4)
    client = open_queue(most, places)
    state, requests, known, refused = {}, {}, 0, 0  # by key: "waits" or "runs"
    for _ in range(300):
        waits = [key for key in state if state[key] == "waits"]
        runs = [key for key in state if state[key] == "runs"]
        kind = draw.randrange(5)
        if kind <= 1:
            free = 0 if any(key <= known for key in waits) else max(0, places - len(runs))
            if max(0, len(waits) + 1 - free) > most:
                refused += 1
                with pytest.raises(QueueFullError, match=f"{most} requests wait"):
                    client.submit(make_request())
            else:
                request = make_request()
                client.submit(request)
                key = client._next_key - 1
                state[key], requests[key] = "waits", request
        elif kind == 2 and len(runs) < places and waits:
            known = max(known, draw.choice(waits), waits[0])
            state[waits[0]] = "runs"
            client._on_message(Outputs(0.0, known, (Entered(waits[0], 5),), ()))
            assert requests[waits[0]].num_cached == 5
        elif kind == 3 and runs:
            key = draw.choice(runs)
            del state[key]
            client._on_message(Outputs(0.0, known, (), (Delta(key, (5,), (), "length"),)))
        elif kind == 4 and state:
            key = draw.choice(list(state))
            del state[key]
            client.abort(requests[key])
            client.abort(requests[key])
        waits = [key for key in state if state[key] == "waits"]
        num_running = len(state) - len(waits)
        free = 0 if any(key <= known for key in waits) else max(0, places - num_running)
        assert client.num_waiting == max(0, len(waits) - free)
        assert client.num_running == num_running
    assert refused > 0


@pytest.mark.parametrize(("waiting", "spread", "expected"), [
    (0, 100.0, 13), (1, 100.0, 25), (2, 100.0, 38), (1, 0.1, 1), (3, 1000.0, 60),
])  # fmt: skip
def test_a_refusal_says_when_to_come_again(monkeypatch, waiting, spread, expected):
    """From the time that each of the last requests took, rounded up, 1 to 60 s."""
    now = [0.0]
    monkeypatch.setattr(client_module, "perf_counter", lambda: now[0])
    client = open_queue(waiting, 1)
    assert client.retry_after(99) == 1, "nothing has ended yet"
    for i in range(1, 9):
        request = make_request()
        client.submit(request)
        now[0] = 5.0 + spread * (i - 1) / 8
        client._on_message(Outputs(0.0, i, (Entered(i, 0),), (Delta(i, (5,), (), "length"),)))
    now[0] = 5.0 + spread
    for _ in range(1 + waiting):
        client.submit(make_request())
    client._on_message(Outputs(0.0, 9, (Entered(9, 0),), ()))
    with pytest.raises(QueueFullError) as caught:
        client.submit(make_request())
    assert caught.value.retry_after_s == expected


def test_a_queue_that_the_engine_does_not_read_is_full():
    client = open_queue(5, 5)
    for unsent, is_full in ((MAX_UNSENT_BYTES, False), (MAX_UNSENT_BYTES + 1, True)):
        client._supervisor._engine = SimpleNamespace(unsent_bytes=unsent)
        if is_full:
            with pytest.raises(QueueFullError):
                client.check_room()
        else:
            client.check_room()


@pytest.mark.parametrize("state", [s for s in EngineState if s is not EngineState.READY])
def test_without_an_engine_nothing_is_taken(state):
    client = open_queue(5, 5)
    client._supervisor.state = state
    with pytest.raises(EngineDeadError, match=f"the engine is {state.value}"):
        client.submit(make_request())
