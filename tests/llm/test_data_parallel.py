"""`LLM` with requests of its own on each rank: the answers of one process, whatever comes when."""

import os
import random
import signal

import numpy as np
import pytest

from tests.dsv4_engine import TOLERANCE, open_v4, random_ids, write_repeating, write_tokenizer
from tests.engine_process import is_alive
from tests.parallel.shared_models import write_v4
from tests.patience import wait_for
from tests.tiny_llm import greedy
from tiercel.errors import EngineDeadError
from tiercel.params import SamplingParams, StructuredOutputs

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("forked_engines")]
# Long prompts come in chunks, and there are fewer rows than requests.
SIZES = {"max_num_batched_tokens": 64, "max_num_seqs": 3}
START = random_ids(150, 1)


@pytest.fixture(autouse=True)
def _cpu_ranks(monkeypatch):
    monkeypatch.setenv("TIERCEL_CPU_RANKS", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny checkpoint with a tokenizer, whose draft head is right now and then."""
    return write_repeating(tmp_path_factory.mktemp("v4"), tokenizer=True)


def open_alone(path, **options):
    return open_v4(path, **(SIZES | options))


def open_ranks(path, size=2, **options):
    return open_alone(path, tensor_parallel_size=size, data_parallel_attention=True, **options)


def prompts():
    ids = [random_ids(count, count) for count in (5, 40, 3, 77, 9)]
    return [{"prompt_token_ids": text} for text in (START, *ids, [*START[:130], 5, 6])]


def params():
    form = StructuredOutputs(regex="[a-z]{1,9}")
    return [
        greedy(20), greedy(7), greedy(30), SamplingParams(max_tokens=9, seed=3, logprobs=2),
        greedy(12, prompt_logprobs=1),
        SamplingParams(max_tokens=9, seed=5, structured_outputs=form), greedy(9),
    ]  # fmt: skip


def ids_of(outputs):
    return [list(answer.token_ids) for output in outputs for answer in output.outputs]


def read(llm):
    """Answers of every kind: ids, those of a stream that is left, and values."""
    answers = llm.generate(prompts(), params())
    again = llm.generate(prompts()[:2], greedy(5))
    streamed = []
    for delta in llm.stream(prompts()[1], greedy(20)):
        streamed += delta.token_ids
        if len(streamed) > 7:
            break  # its request is aborted on every rank
    logprobs = [entry.logprob for entry in answers[3].outputs[0].logprobs]
    values = [llm.logits(random_ids(40, 2)), np.array(logprobs)]
    return [ids_of(answers), ids_of(again), streamed], values


def assert_as_alone(llm, alone):
    expected, expected_values = read(alone)
    found, values = read(llm)
    assert found == expected
    for mine, theirs in zip(values, expected_values, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=TOLERANCE)


SPECS = [pytest.param(spec, marks=() if spec == "hybrid" else pytest.mark.slow)
         for spec in ("off", "ngram", "mtp", "hybrid")]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_two_ranks_answer_as_one_process(model, spec):
    with open_alone(model, spec=spec) as alone, open_ranks(model, spec=spec) as llm:
        assert_as_alone(llm, alone)
        schedulers = llm._engine.scheduler.schedulers
        assert all(scheduler._num_added > 2 for scheduler in schedulers), "both had requests"
        assert sum(scheduler.prefix_hits for scheduler in schedulers) >= 128
        counts = llm._engine.draft_counts
        assert spec == "off" or counts.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["off", "mtp"])
def test_four_ranks_answer_as_one_process(tmp_path, spec):
    path = write_v4(tmp_path, formats=True)
    write_tokenizer(path)
    with open_alone(path, spec=spec) as alone, open_ranks(path, 4, spec=spec) as llm:
        assert_as_alone(llm, alone)


def test_a_rank_with_nothing_to_do_takes_part(model):
    """One request at a time, on each rank in turn."""
    with open_alone(model, spec="mtp") as alone, open_ranks(model, spec="mtp") as llm:
        for number in range(3):
            prompt = {"prompt_token_ids": random_ids(10 + number, number)}
            wanted = ids_of(alone.generate(prompt, greedy(6)))
            assert ids_of(llm.generate(prompt, greedy(6))) == wanted
        assert [s._num_added for s in llm._engine.scheduler.schedulers] == [2, 1]


def test_the_loss_of_a_rank_ends_the_call(model):
    llm = open_ranks(model)
    pids = llm._engine._ranks.pids
    stream = llm.stream(prompts()[1], greedy(250))
    next(stream)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="rank 1 was ended by signal SIGKILL"):
        for _ in stream:
            pass
    wait_for(lambda: not any(map(is_alive, pids)))
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["off", "mtp"])
def test_requests_that_end_at_random(model, spec):
    """Streams are left at random while others go on; what they gave is what one process gives."""
    dice = random.Random(7)
    with open_alone(model, spec=spec) as alone, open_ranks(model, spec=spec) as llm:
        for number in range(12):
            prompt = {"prompt_token_ids": random_ids(dice.randint(1, 90), number)}
            wanted = ids_of(alone.generate(prompt, greedy(25)))[0]
            found, most = [], dice.randint(1, 25)
            for delta in llm.stream(prompt, greedy(25)):
                found += delta.token_ids
                if len(found) >= most:
                    break
            assert found == wanted[: len(found)]
        assert_as_alone(llm, alone)
