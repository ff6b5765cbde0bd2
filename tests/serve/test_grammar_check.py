"""The check of grammars: refused in time, at the cost of one request, and remembered."""

import asyncio
import os
import signal
import threading
from pathlib import Path
from time import perf_counter

import pytest

from tests.patience import PATIENCE_S
from tests.tiny_llm import LLAMA
from tiercel.errors import InternalError, InvalidRequestError, QueueFullError
from tiercel.grammar.matcher import read_token_table
from tiercel.grammar.spec import GrammarSpec, compile_spec
from tiercel.models.source import open_source
from tiercel.params import StructuredOutputs
from tiercel.serve import grammar_check
from tiercel.serve.grammar_check import GrammarChecker

# Few bytes, five seconds and 200 MB to compile; our own limit on schemas does not see it here.
SLOW = 'start: %json {"type": "integer", "multipleOf": 1000003}'


def spec(**form):
    return compile_spec(StructuredOutputs(**form), max_tokens=512)


@pytest.fixture(scope="module")
def table():
    source = open_source(LLAMA)
    return read_token_table(source.tokenizer(None), source.config.vocab_size)


@pytest.fixture(scope="module")
def checker(table):
    checker = GrammarChecker(table)
    checker.start()
    yield checker
    checker.close()


def pids(checker):
    return [worker.pid for worker in checker._workers._all]


def test_sound_grammars_pass(checker):
    for form in ({"json": {"type": "object"}}, {"regex": "a+"}, {"choice": ["a"]}):
        checker.check_now(spec(**form))
    asyncio.run(checker.check(spec(json_object=True), "a"))


def test_unsound_grammars_are_refused_as_the_engine_would(checker):
    for form, words in (
        ({"json": {"uniqueItems": True}}, "uniqueItems"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "start: <|im_end|>"}, "no answer"),  # known by the first mask only
    ):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            checker.check_now(spec(**form))
        assert caught.value.code == "invalid_schema"


@pytest.mark.reliability
def test_a_slow_grammar_costs_one_request(table, monkeypatch):
    checker = GrammarChecker(table, seconds=1)
    checker.start()
    try:
        before = pids(checker)
        with pytest.raises(InvalidRequestError, match="more than 1 s") as caught:
            asyncio.run(checker.check(spec(grammar=SLOW), "a"))
        assert caught.value.code == "schema_too_complex"
        assert checker.num_kills == 1
        with monkeypatch.context() as patch:
            patch.setattr(checker, "_seconds", PATIENCE_S)  # a new process on a busy machine
            checker.check_now(spec(choice=["b"]))
            checker.check_now(spec(choice=["c"]))
        assert len(set(before) & set(pids(checker))) == 1  # the other process lives on
        with pytest.raises(InvalidRequestError, match="more than 1 s"):
            checker.check_now(spec(grammar=SLOW))
        assert checker.num_kills == 1  # what was found is kept
        monkeypatch.setattr(grammar_check, "perf_counter", lambda: perf_counter() + 61)
        with pytest.raises(InvalidRequestError):
            checker.check_now(spec(grammar=SLOW))
        assert checker.num_kills == 2  # but not for ever: the machine may have been busy
    finally:
        checker.close()
    assert pids(checker) == [None, None]


@pytest.mark.reliability
def test_a_process_that_dies_is_replaced(checker):
    for pid in pids(checker):
        os.kill(pid, signal.SIGKILL)
    found = []
    for number in range(6):  # the first on each process may still find it dead
        try:
            checker.check_now(spec(choice=[f"d{number}"]))
        except InvalidRequestError as error:
            assert error.code == "schema_too_complex"  # noqa: PT017 - any of them may fail
        else:
            found.append(number)
    assert found[-2:] == [4, 5]


def test_what_was_found_is_bounded(checker, monkeypatch):
    monkeypatch.setattr(grammar_check, "MAX_VERDICTS", 3)
    for number in range(6):
        checker.check_now(spec(choice=[str(number)]))
    assert len(checker._verdicts) == 3
    assert spec(choice=["5"]).digest in checker._verdicts
    checker.check_now(spec(choice=["3"]))  # used, so it is the newest now
    checker.check_now(spec(choice=["9"]))
    assert spec(choice=["3"]).digest in checker._verdicts
    assert spec(choice=["4"]).digest not in checker._verdicts


def test_checks_run_side_by_side(checker):
    async def many():
        await asyncio.gather(*(checker.check(spec(choice=[f"s{i}"]), "a") for i in range(20)))

    asyncio.run(many())


@pytest.mark.reliability
def test_the_process_sees_no_environment(checker):
    assert Path(f"/proc/{pids(checker)[0]}/environ").read_bytes() == b""
    limits = Path(f"/proc/{pids(checker)[0]}/limits").read_text()
    space = next(line for line in limits.splitlines() if line.startswith("Max address space"))
    assert "unlimited" not in space


def test_a_spec_is_named_by_its_content():
    assert GrammarSpec("a").digest == GrammarSpec("a").digest != GrammarSpec("b").digest


class Compiles:
    """Stands for the processes: each grammar waits for a permit; `begun` is their order."""

    def __init__(self, checker, monkeypatch):
        self.begun = []
        self.permits = threading.Semaphore(0)
        monkeypatch.setattr(checker._workers, "request", self._request)

    def _request(self, message, _timeout_s):
        self.begun.append(message["text"])
        assert self.permits.acquire(timeout=PATIENCE_S)
        return {}


@pytest.fixture
def held(table, monkeypatch):
    """A checker whose compiler waits for the test."""
    checker = GrammarChecker(table, seconds=2, max_wait_s=PATIENCE_S)
    compiles = Compiles(checker, monkeypatch)
    yield checker, compiles
    compiles.permits.release(500)


async def begin(checker, name, client):
    """Ask for a grammar; returns when it waits."""
    task = asyncio.create_task(checker.check(GrammarSpec(name), client))
    await asyncio.sleep(0)
    return task


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_one_grammar_of_another_client_waits_for_two_of_thirty(held):
    checker, compiles = held

    async def main():
        many = [await begin(checker, f"a{number}", "a") for number in range(30)]
        await until(lambda: len(compiles.begun) == 2)
        one = await begin(checker, "b0", "b")
        compiles.permits.release(31)
        await asyncio.gather(one, *many)

    asyncio.run(main())
    assert sorted(compiles.begun[:2]) == ["a0", "a1"], "both processes"
    assert compiles.begun.index("b0") <= 3
    assert len(compiles.begun) == 31


def test_a_client_may_let_so_many_wait_and_others_still_come(held, monkeypatch):
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 3)
    checker, compiles = held

    async def main():
        tasks = [await begin(checker, f"a{number}", "a") for number in range(2)]
        await until(lambda: len(compiles.begun) == 2)
        tasks += [await begin(checker, f"a{number}", "a") for number in range(2, 5)]
        with pytest.raises(QueueFullError, match="3 grammars of this client wait") as caught:
            await checker.check(GrammarSpec("a5"), "a")
        assert (caught.value.http_status, caught.value.retry_after_s) == (429, 2)
        tasks.append(await begin(checker, "a4", "a"))  # the same again is no other one
        tasks.append(await begin(checker, "b0", "b"))
        compiles.permits.release(6)
        await asyncio.gather(*tasks)
        assert len(compiles.begun) == 6
        await checker.check(GrammarSpec("a4"), "a")  # kept

    asyncio.run(main())


def test_who_leaves_gives_the_place_back(held):
    checker, compiles = held

    async def main():
        first = [await begin(checker, f"a{number}", "a") for number in range(4)]
        await until(lambda: len(compiles.begun) == 2)
        second = await begin(checker, "a2", "a")
        for task in first:
            task.cancel()
        await asyncio.wait(first)
        assert len(checker._waiting) == 1, "a2 has another task"
        compiles.permits.release(3)
        await second
        await until(lambda: checker._num_running == 0)
        assert sorted(compiles.begun) == ["a0", "a1", "a2"]
        assert not checker._checks

    asyncio.run(main())


def test_waiting_has_an_end(held):
    checker, compiles = held
    checker._max_wait_s = 0.05

    async def main():
        tasks = [await begin(checker, f"a{number}", "a") for number in range(3)]
        for task in tasks:
            with pytest.raises(QueueFullError, match="No grammar process became free") as caught:
                await task
            assert (caught.value.http_status, caught.value.code) == (503, "queue_timeout")
        assert not len(checker._waiting)
        compiles.permits.release(2)
        await until(lambda: checker._num_running == 0)

    asyncio.run(main())


def test_a_compiler_that_breaks_is_told_to_each_and_goes_on(held, monkeypatch):
    checker, _ = held

    def broken(_message, _timeout_s):
        raise InternalError("the grammar process did not start.")

    monkeypatch.setattr(checker._workers, "request", broken)

    async def main():
        tasks = [await begin(checker, f"a{number % 3}", "a") for number in range(6)]
        for task in tasks:
            with pytest.raises(InternalError):
                await task
        assert checker._num_running == 0

    asyncio.run(main())
