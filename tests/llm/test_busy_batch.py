"""A busy batch: with arrivals, ends and preemptions each answer equals the one it has alone."""

import functools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.tiny_llm import DATA, NAMES, PROMPTS, assert_idle, greedy, ids_of, open_tiny
from tiercel.engine import build as engine_module
from tiercel.params import SamplingParams
from tiercel.request.request import Status

NUM_REQUESTS = 64


def make_prompts(name):
    """Prompts and numbers of tokens to generate; some share a prefix."""
    draw = random.Random(name)
    prompts = [
        [draw.randrange(5, 250) for _ in range(draw.choice((1, 3, 20, 60, 64, 65, 130)))]
        for _ in range(NUM_REQUESTS - 8)
    ]
    prompts += [[*prompts[0], *prompts[i]][:130] for i in range(8)]
    return prompts, [draw.choice((1, 5, 40, 90, 90)) for _ in prompts]


def make_requests(llm, name):
    for prompt, length in zip(*make_prompts(name), strict=True):
        yield llm._inputs.request(prompt, SamplingParams(temperature=0, max_tokens=length), 0)


def run_alone(llm, request):
    llm._engine.submit(request)
    while llm._engine.has_work:
        llm._engine.step()
    return request.output_token_ids


@functools.cache
def answers_alone(name):
    """The answers to each request of `make_prompts` alone."""
    with open_tiny(DATA / f"{name}.gguf", max_model_len=256) as llm:
        return [run_alone(llm, request) for request in make_requests(llm, name)]


def run_busy(engine, requests, draw):
    """Submit in random order, abort now and then; returns the aborted requests."""
    waiting, aborted = list(requests), set()
    draw.shuffle(waiting)
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), draw.randrange(4))):
            engine.submit(waiting.pop())
        victim = draw.choice(requests)
        is_live = victim not in waiting and victim.status is not Status.FINISHED
        if is_live and draw.random() < 0.08:
            aborted.add(victim)
            engine.abort(victim)
        engine.step()
    return aborted


# Without overlap one of the models by default.
CASES = [
    pytest.param(name, overlap, marks=[pytest.mark.slow] * ((overlap == "0") != (name == NAMES[0])))
    for name in NAMES
    for overlap in ("0", "1")
]


@pytest.mark.parametrize(("name", "overlap"), CASES)
def test_each_answer_of_a_busy_batch_is_the_one_it_gives_alone(monkeypatch, name, overlap):
    """Random lengths and arrivals, aborts, and a cache that forces preemptions."""
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    draw = random.Random(f"{name} {overlap}")
    alone = answers_alone(name)
    sizes = engine_module.cache_blocks

    def few(groups, **options):
        return [min(size, 1 + 12) for size in sizes(groups, **options)]

    monkeypatch.setattr(engine_module, "cache_blocks", few)
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 96, "max_model_len": 256}
    with open_tiny(DATA / f"{name}.gguf", **options) as llm:
        requests = list(make_requests(llm, name))
        aborted = run_busy(llm._engine, requests, draw)
        assert llm._engine.scheduler.num_preemptions > 3
        assert aborted
        assert_idle(llm)
    for request, expected in zip(requests, alone, strict=True):
        got = request.output_token_ids
        assert got == (expected[: len(got)] if request in aborted else expected)


def test_threads_that_share_a_model_get_their_own_answers():
    def answer(i):
        texts = [delta.text for delta in llm.stream(PROMPTS[i % len(PROMPTS)], greedy(9 + i))]
        return "".join(texts), ids_of(llm.generate([f"{i}", f"the {i}"], greedy(20)))

    with open_tiny(max_num_seqs=4) as llm:
        expected = [answer(i) for i in range(8)]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(answer, range(8))) == expected
        assert_idle(llm)


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_a_long_prompt_stalls_nobody_for_more_than_a_chunk(monkeypatch, overlap):
    """While 2,000 tokens are computed in chunks of 32, other requests get a token in every step."""
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    with open_tiny(max_num_batched_tokens=32) as llm:
        engine = llm._engine
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        users = [llm._inputs.request([9 + i], params, 0) for i in range(3)]
        for request in users:
            engine.submit(request)
        while not all(request.output_token_ids for request in users):
            engine.step()
        longest = llm.config.max_model_len - 10
        slow = llm._inputs.request(
            [i % 250 for i in range(min(2000, longest))], SamplingParams(max_tokens=1), 0
        )
        engine.submit(slow)
        num_steps = 0
        while not slow.output_token_ids and num_steps < 60:
            before = [len(request.output_token_ids) for request in users]
            engine.step()
            num_steps += 1
            after = [len(request.output_token_ids) for request in users]
            assert after == [count + 1 for count in before]
        assert num_steps > 5, "the prompt took many chunks"
        for request in [*users, slow]:
            engine.abort(request)
        assert_idle(llm)
