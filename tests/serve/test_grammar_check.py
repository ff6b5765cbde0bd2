"""The check of grammars: refused in time, at the cost of one request, and remembered."""

import asyncio
import os
import signal
from pathlib import Path
from time import perf_counter

import pytest

from tests.tiny_llm import LLAMA
from tiercel.engine.grammar import GrammarSpec, compile_spec
from tiercel.engine.grammar_matcher import read_token_table
from tiercel.errors import InvalidRequestError
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
    asyncio.run(checker.check(spec(json_object=True)))


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
            asyncio.run(checker.check(spec(grammar=SLOW)))
        assert caught.value.code == "schema_too_complex"
        assert checker.num_kills == 1
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
    monkeypatch.setattr(grammar_check, "MAX_KEPT", 3)
    for number in range(6):
        checker.check_now(spec(choice=[str(number)]))
    assert len(checker._kept) == 3
    assert spec(choice=["5"]).digest in checker._kept
    checker.check_now(spec(choice=["3"]))  # used, so it is the newest now
    checker.check_now(spec(choice=["9"]))
    assert spec(choice=["3"]).digest in checker._kept
    assert spec(choice=["4"]).digest not in checker._kept


def test_checks_run_side_by_side(checker):
    async def many():
        await asyncio.gather(*(checker.check(spec(choice=[f"s{i}"])) for i in range(20)))

    asyncio.run(many())


@pytest.mark.reliability
def test_the_process_sees_no_environment(checker):
    assert Path(f"/proc/{pids(checker)[0]}/environ").read_bytes() == b""
    limits = Path(f"/proc/{pids(checker)[0]}/limits").read_text()
    space = next(line for line in limits.splitlines() if line.startswith("Max address space"))
    assert "unlimited" not in space


def test_a_spec_is_named_by_its_content():
    assert GrammarSpec("a").digest == GrammarSpec("a").digest != GrammarSpec("b").digest
