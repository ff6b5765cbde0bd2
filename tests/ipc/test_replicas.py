"""Several engines behind one client: where requests go, and what the death of one means."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from tests.engine_process import QUICK, read
from tests.ipc.test_client import fake_info
from tiercel.config import LoadOptions
from tiercel.errors import ArgumentError, EngineDeadError, EngineDiedTwiceError, QueueFullError
from tiercel.ipc.client import MAX_UNSENT_BYTES, EngineClient
from tiercel.ipc.messages import Delta, Entered, Outputs, PromptProgress, Ready
from tiercel.ipc.nodes import Cluster
from tiercel.ipc.replicas import Replicas
from tiercel.ipc.siblings import Siblings
from tiercel.ipc.streams import ANSWER_TOKENS
from tiercel.ipc.supervisor import EngineState
from tiercel.params import SamplingParams
from tiercel.request.request import Request

pytestmark = pytest.mark.reliability
BLOCK = 4


def info_of(**fields):
    defaults = {"max_num_seqs": 2, "block_size": BLOCK, "num_blocks": 100, "has_prefix_cache": True}
    return fake_info(**{**defaults, **fields})


def open_replicas(count=2, *, max_waiting=512, is_started=True, **fields):
    """Engines without processes, ready."""
    siblings = Siblings(QUICK.window_s)
    replicas = Replicas(
        [
            EngineClient(LoadOptions(), max_waiting=max_waiting, siblings=siblings)
            for _ in range(count)
        ],
        max_waiting=max_waiting,
    )
    for number in range(count):
        make_ready(replicas, number, **fields)
    replicas._has_started = is_started
    return replicas


def make_ready(replicas, number, **fields):
    client = replicas.replicas[number]
    client._on_message(Ready(info_of(**fields)))
    client._supervisor.state = EngineState.READY


def make_request(prompt=(1,), max_tokens=8):
    return Request("r", list(prompt), SamplingParams(), 0, 0, frozenset(), max_tokens)


def end(replicas, number):
    """All requests of an engine end."""
    client = replicas.replicas[number]
    for key in list(client._live):
        client._on_message(Outputs(0.0, key, (Entered(key, 0),), ()))
        client._on_message(Outputs(0.0, key, (), (Delta(key, (5,), (), "length"),)))


def lose(replicas, number, state=EngineState.RESTARTING, suspects=()):
    """An engine dies; `DEAD`: for the last time."""
    client = replicas.replicas[number]
    client._supervisor.state = state
    error = EngineDeadError("the engine is dead: for good.")
    error.code = "engine_dead"
    client._on_lost(suspects, error if state is EngineState.DEAD else None)


def place_of(replicas, stream):
    return [c for c, client in enumerate(replicas.replicas) if stream.request in client._keys]


def submit(replicas, *arguments):
    """Which engine takes a request."""
    (place,) = place_of(replicas, replicas.submit(make_request(*arguments)))
    return place


def test_requests_go_where_the_least_is_to_be_computed():
    replicas = open_replicas(3, max_num_seqs=9)
    assert [submit(replicas, range(100), 5) for _ in range(3)] == [0, 1, 2]
    assert submit(replicas, [7], 3) == 0
    (key, *_) = replicas.replicas[1]._live
    replicas.replicas[1]._on_message(Outputs(0.0, key, (Entered(key, 40),), ()))
    replicas.replicas[1]._on_message(PromptProgress(key, 60))
    assert [c.num_waiting_tokens for c in replicas.replicas] == [109, 45, 105]
    assert submit(replicas, [8], 50) == 1
    replicas.replicas[1]._on_message(Outputs(0.0, key, (), (Delta(key, (5,), (), None),)))
    assert replicas.replicas[1].num_waiting_tokens == 5 + 51, "the reader has not read it yet"


def test_an_answer_without_a_limit_counts_as_a_usual_one():
    replicas = open_replicas()
    replicas.submit(make_request(max_tokens=100_000))
    assert replicas.replicas[0].num_waiting_tokens == 1 + ANSWER_TOKENS


def test_a_conversation_stays_where_its_history_is():
    replicas = open_replicas()
    prompt = list(range(50))
    first = submit(replicas, prompt)
    end(replicas, first)
    assert submit(replicas, [99] * 50) == 1 - first, "another one takes its turn"
    end(replicas, 1 - first)
    for more in range(5):
        prompt += [more] * 10
        assert submit(replicas, prompt) == first
        end(replicas, first)
    assert submit(replicas, [99] * 60) == 1 - first


def test_a_restarted_engine_and_one_that_forgot_know_nothing():
    replicas = open_replicas()
    prompt = list(range(50))
    assert submit(replicas, prompt) == 0
    end(replicas, 0)
    lose(replicas, 0)
    assert submit(replicas, prompt) == 1
    end(replicas, 1)
    make_ready(replicas, 0)
    assert submit(replicas, prompt) == 1, "only this one has it"
    end(replicas, 1)
    asyncio.run(forget(replicas))
    assert submit(replicas, prompt) == 0, "its turn is longest ago"


async def forget(replicas):
    for client in replicas.replicas:
        client._supervisor.send = lambda _frame, client=client: client._has_forgotten.set()
    await replicas.forget()


@pytest.mark.parametrize(
    "request_fields", [{"pooling": "mean"}, {"params": SamplingParams(prompt_logprobs=0)}]
)
def test_what_reads_its_own_prompt_finds_and_leaves_no_prefix(request_fields):
    replicas = open_replicas()
    for number in (0, 1, 0, 1):
        request = make_request(range(50))
        for name, value in request_fields.items():
            setattr(request, name, value)
        assert place_of(replicas, replicas.submit(request)) == [number]
        end(replicas, number)


def test_without_a_prefix_cache_turns_are_taken():
    replicas = open_replicas(has_prefix_cache=False)
    for number in (0, 1, 0, 1):
        assert submit(replicas, range(50)) == number
        end(replicas, number)


def test_an_engine_that_dies_loses_its_own_requests_alone():
    replicas = open_replicas()
    mine, other = (replicas.submit(make_request([n] * 20)) for n in range(2))
    assert (place_of(replicas, mine), place_of(replicas, other)) == ([0], [1])
    lose(replicas, 0)
    assert replicas.state is EngineState.READY
    with pytest.raises(EngineDeadError, match="the engine ended while this request was under way"):
        asyncio.run(read(mine))
    assert place_of(replicas, other) == [1]
    assert [submit(replicas) for _ in range(3)] == [1, 1, 1]
    make_ready(replicas, 0)
    assert submit(replicas) == 0


def test_clients_are_told_that_all_is_over_by_the_last_engine_alone():
    replicas = open_replicas()
    first, last = (replicas.submit(make_request([n] * 20)) for n in range(2))
    lose(replicas, 0, EngineState.DEAD)
    with pytest.raises(EngineDeadError) as refused:
        asyncio.run(read(first))
    assert refused.value.code == "engine_restarting"
    assert replicas.state is EngineState.READY
    lose(replicas, 1, EngineState.DEAD)
    with pytest.raises(EngineDeadError) as refused:
        asyncio.run(read(last))
    assert refused.value.code == "engine_dead"
    assert replicas.state is EngineState.DEAD
    with pytest.raises(EngineDeadError, match="the engine is dead"):
        replicas.submit(make_request())


def test_a_request_that_ends_two_engines_is_the_suspect():
    replicas = open_replicas(3)
    for number in range(2):
        request = make_request([6, 6, 6])
        stream = replicas.submit(request)
        (place,) = place_of(replicas, stream)
        key = replicas.replicas[place]._keys[request]
        replicas.replicas[place]._on_message(Outputs(0.0, key, (Entered(key, 0),), ()))
        lose(replicas, place, suspects=("r",))
        with pytest.raises(EngineDiedTwiceError if number else EngineDeadError) as refused:
            asyncio.run(read(stream))
        assert isinstance(refused.value, EngineDiedTwiceError) == bool(number)


@pytest.mark.parametrize("is_started", [False, True])
def test_the_state_of_all(is_started):
    """Of each pair of states; before all were ready once, each one counts."""
    replicas = open_replicas(is_started=is_started)
    states = [s for s in EngineState if s is not EngineState.DRAINING]
    order = ["ready", "loading", "restarting", "dead"]
    for one in states:
        for other in states:
            for client, state in zip(replicas.replicas, (one, other), strict=True):
                client._supervisor.state = state
            choose = min if is_started else max
            expected = choose((one.value, other.value), key=order.index)
            assert replicas.state.value == expected
            if expected != "ready":
                with pytest.raises(EngineDeadError):
                    replicas.check_room()


def test_progress_is_that_of_the_last_and_later_of_the_first():
    replicas = open_replicas(is_started=False)
    for client, share in zip(replicas.replicas, (0.25, 0.75), strict=True):
        client._supervisor.progress = share
    assert replicas.progress == 0.25
    assert replicas.info is None
    replicas._has_started = True
    assert replicas.progress == 0.75


def test_the_smallest_engine_decides_what_fits():
    replicas = open_replicas()
    make_ready(replicas, 1, num_blocks=50)
    assert replicas.info is replicas.replicas[1].info
    make_ready(replicas, 1, num_blocks=150)
    assert replicas.info is replicas.replicas[0].info


@pytest.mark.parametrize("seed", range(10))
def test_the_queue_of_all_counts_free_rows_of_all(seed):
    """Arrivals and ends in any order, of requests that are all alike."""
    draw = random.Random(seed)
    count, most, rows = draw.randint(2, 4), draw.randrange(4), draw.randint(1, 3)
    replicas = open_replicas(count, max_waiting=most, max_num_seqs=rows)
    num_live, num_refused = 0, 0
    for _ in range(200):
        if draw.random() < 0.6:
            wanted = draw.randint(1, 3)
            live = [len(client._live) for client in replicas.replicas]
            free = sum(max(0, rows - number) for number in live)
            waiting = sum(max(0, number - rows) for number in live)
            if waiting + max(0, wanted - free) > most:
                num_refused += 1
                with pytest.raises(QueueFullError, match=f"{most} requests wait"):
                    replicas.check_room(wanted)
                continue
            replicas.check_room(wanted)
            for _ in range(wanted):
                replicas.submit(make_request())
            num_live += wanted
        elif num_live:
            client = draw.choice([c for c in replicas.replicas if c._live])
            live = next(iter(client._live.values()))
            replicas.abort(live.request)
            replicas.abort(live.request)
            num_live -= 1
        assert sum(len(client._live) for client in replicas.replicas) == num_live
    assert num_refused > 0


def test_an_engine_that_does_not_read_gets_nothing_more():
    replicas = open_replicas()
    first, second = replicas.replicas
    first._supervisor._engine = SimpleNamespace(unsent_bytes=MAX_UNSENT_BYTES + 1)
    assert [submit(replicas) for _ in range(3)] == [1, 1, 1]
    second._supervisor._engine = first._supervisor._engine
    with pytest.raises(QueueFullError):
        replicas.submit(make_request())


def test_each_engine_knows_its_number():
    from tiercel.cli.serve import make_client as make_all

    def options_of(client):
        return client._supervisor._start_engine.args[-1]

    replicas = make_all(LoadOptions(seed=7), 3, 5, QUICK, None).replicas
    expected = [LoadOptions(seed=7, replica=number, num_replicas=3) for number in range(3)]
    assert [options_of(client) for client in replicas] == expected
    assert len({id(client._siblings) for client in replicas}) == 1
    (alone,) = make_all(LoadOptions(seed=7), 1, 5, QUICK, None).replicas
    assert options_of(alone) == LoadOptions(seed=7)
    far = make_all(LoadOptions(seed=7), 3, 5, QUICK, Cluster("head", 6379, "me")).replicas
    assert [options_of(client) for client in far] == [LoadOptions(seed=7)] * 3
    assert len({id(client._siblings) for client in far}) == 1


@pytest.mark.parametrize("field", ["tokenizer", "max_num_seqs", "dtype"])
def test_engines_of_different_models_are_no_replicas(field):
    """All but the field are equal; the cache of each may have a size of its own."""
    replicas = open_replicas(3)
    values = {"tokenizer": b"x", "max_num_seqs": 7, "dtype": "float64"}
    make_ready(replicas, 1, num_blocks=7)
    for client in replicas.replicas:
        client._supervisor._settled.set()
    assert asyncio.run(replicas.wait_ready()).num_blocks == 7
    make_ready(replicas, 2, **{field: values[field]})
    with pytest.raises(ArgumentError, match=f"engine 2 differs from engine 0 in {field}"):
        asyncio.run(replicas.wait_ready())
