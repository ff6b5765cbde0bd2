"""Requests in a real engine process: streams, ends, aborts in every state, the queue's bound."""

import asyncio
import random
from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest
import torch

from tests.engine_process import (
    Maker,
    descriptors,
    make_client,
    open_client,
    read,
    read_now,
    wait_idle,
    wait_until,
)
from tests.patience import PATIENCE_S
from tests.tiny_llm import PROMPTS, greedy, ids_of, open_tiny
from tiercel.errors import (
    InvalidRequestError,
    QueueFullError,
)
from tiercel.grammar.spec import GrammarSpec
from tiercel.ipc.messages import (
    Delta,
    EngineInfo,
    EngineStats,
    Entered,
    ErrorInfo,
    Outputs,
    Ready,
    Refused,
)
from tiercel.ipc.supervisor import EngineState
from tiercel.params import SamplingParams
from tiercel.request.request import Request, Status
from tiercel.request.score_inputs import ScoreInputs
from tiercel.request.score_params import ScoreParams
from tiercel.request.text_stream import TextStream

# One place to run and short chunks: a request can be caught in each of its states.
SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_waiting": 3}


def fake_info(**fields):
    zeros = {"int": 0, "float": 0.0, "str": "", "bool": False, "bytes": b""}
    return EngineInfo(
        **{n: zeros.get(t) for n, t in EngineInfo.__annotations__.items() if n not in fields},
        **fields,
    )


class Bench:
    """One engine for all tests of this file, and the event loop that it lives on."""

    def __init__(self):
        self.runner = asyncio.Runner()
        self.client = self.runner.run(open_client(**SMALL))
        self.make = Maker(self.client.info)

    def run(self, main):
        async def whole():
            result = await asyncio.wait_for(main(self.client, self.make), 2 * PATIENCE_S)
            await wait_idle(self.client, self.make)
            assert self.client.num_running == self.client.num_waiting == 0
            return result

        return self.runner.run(whole())


@pytest.fixture(scope="module")
def bench():
    made = Bench()
    yield made
    assert made.client.num_restarts == 0
    made.runner.run(made.client.close())
    made.runner.close()


@pytest.fixture(scope="module")
def expected():
    """What the same engine answers in this process, to the bit: with as many threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with open_tiny(max_num_batched_tokens=16) as llm:
        yield llm
    torch.set_num_threads(num_threads)


def test_answers_are_those_of_the_engine_in_this_process(bench, expected):
    async def main(client, make):
        requests = [make(prompt, greedy(20)) for prompt in PROMPTS]
        outcome = [(request, client.submit(request)) for request in requests[:3]]
        for request in requests[3:]:
            await wait_until(lambda: client.num_waiting < 2)
            outcome.append((request, client.submit(request)))
        texts = []
        for request, stream in outcome:
            text = TextStream(request, make.tokenizer)
            async for update in stream:
                text.push(update.new_token_ids)
            texts.append(text.text)
            assert request.finish_reason == "length"
            assert stream.submitted_s <= stream.entered_s < perf_counter()
        return [request.output_token_ids for request in requests], texts

    ids, texts = bench.run(main)
    outputs = expected.generate(PROMPTS, greedy(20))
    assert [[i] for i in ids] == ids_of(outputs)
    assert texts == [output.outputs[0].text for output in outputs]


def test_logprobs_cached_tokens_and_reasons_arrive(bench, expected):
    params = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )

    async def main(client, make):
        first = make("the thin man", params)
        updates = await read(client.submit(first))
        long = [5] * 130
        requests = [make(long, greedy(1)), make(long, greedy(1))]
        for request in requests:
            await read(client.submit(request))
        stopped = make("a", replace(greedy(50), stop_token_ids=list(range(272))))
        await read(client.submit(stopped))
        return first, updates, requests, stopped

    first, updates, cached, stopped = bench.run(main)
    (output,) = expected.generate("the thin man", params)
    assert first.logprobs == output.outputs[0].logprobs
    assert [None, *first.prompt_logprobs] == output.prompt_logprobs
    assert [u.logprobs for u in updates] == [(entry,) for entry in first.logprobs]
    assert [u.finish_reason for u in updates] == [None] * 5 + ["length"]
    assert cached[0].num_cached == 0
    assert cached[1].num_cached >= 64
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stopped.output_token_ids[0])


def test_long_prompt_logprobs_arrive_whole(bench, expected):
    ids = [i % 250 for i in range(1500)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)

    async def main(client, make):
        request = make(ids, params)
        await read(client.submit(request))
        return request.prompt_logprobs

    (output,) = expected.generate({"prompt_token_ids": ids}, params)
    assert [None, *bench.run(main)] == output.prompt_logprobs


def test_scores_are_those_of_the_engine_in_this_process(bench, expected):
    """Among answers; a list that goes through several steps."""
    items = [[(3 * i + j) % 250 for j in range(1 + i % 5)] for i in range(30)]
    query, labels = [7] * 20, ["a", "ran on"]
    scored = expected.score(query, items, labels)

    async def main(client, make):
        inputs = ScoreInputs(
            make.inputs, make.tokenizer, max_model_len=client.info.max_model_len,
            max_step_tokens=16, max_num_seqs=2,
        )  # fmt: skip
        job = inputs.job(query, items, ScoreParams(labels=labels))
        answer = make("a", greedy(8))
        streams = [client.submit(request) for request in (answer, *job.requests)]
        for stream in streams:
            await read(stream)
        assert answer.finish_reason == "length"
        return job

    job = bench.run(main)
    output = job.output()
    np.testing.assert_allclose(output.logprobs, scored.logprobs, rtol=0, atol=1e-4, equal_nan=False)
    assert scored.usage.mode == "separate"  # its 16 rows leave no room in a step of 16 tokens
    assert output.usage == replace(scored.usage, mode="packed")


def test_seeded_answers_do_not_depend_on_the_process(bench, expected):
    params = SamplingParams(n=2, seed=11, max_tokens=10, ignore_eos=True)

    async def main(client, make):
        requests = [make("a", params, stream=i) for i in range(2)]
        await asyncio.gather(*(read(client.submit(request)) for request in requests))
        return [[request.output_token_ids for request in requests]]

    assert bench.run(main) == ids_of(expected.generate("a", params))


def test_a_stop_string_ends_the_request_in_the_engine(bench):
    async def main(client, make):
        whole = make("the thin man", greedy(40))
        text = TextStream(whole, make.tokenizer)
        pieces = [text.push(update.new_token_ids) async for update in client.submit(whole)]
        wanted = next(piece for piece in pieces[5:] if piece.isalnum())
        request = make("the thin man", replace(greedy(2000), stop=[wanted]))
        text = TextStream(request, make.tokenizer)
        stream = client.submit(request)
        async for update in stream:
            text.push(update.new_token_ids)
            if text.matched is not None:
                client.stop(request, text.matched)
        before = client.stats
        await wait_idle(client, make)
        assert client.stats.num_generation_tokens - before.num_generation_tokens < 1900
        assert (request.finish_reason, request.stop_reason) == ("stop", wanted)
        assert len(request.output_token_ids) <= 40
        assert wanted not in text.text

    bench.run(main)


async def abort_in(state, client, make):
    """Abort a request in this state; tokens made and prompt tokens computed meanwhile."""
    await wait_idle(client, make)
    before = client.stats
    others = [make([3] * 20, greedy(60)) for _ in range(2)] if state == "waiting" else []
    streams = [client.submit(request) for request in others]
    for stream in streams:
        await anext(stream)
    params = greedy(1 if state in ("done", "finished") else 1900)
    prompt = [9] * (2000 if state == "prefill" else 40)
    request = make(prompt, params)
    stream = client.submit(request)
    if state == "prefill":
        await wait_until(lambda: stream.entered_s is not None)
    elif state == "decode":
        await anext(stream)
    elif state == "done":
        await wait_until(lambda: not client._live)
    elif state == "finished":
        await read(stream)
    client.abort(request)
    client.abort(request)
    rest = read_now(stream)
    if state == "finished":
        assert rest == []
    expected_reason = "length" if state in ("done", "finished") else "abort"
    assert request.finish_reason == expected_reason
    assert request.status is Status.FINISHED
    for stream in streams:
        assert (await read(stream))[-1].finish_reason == "length"
    await wait_idle(client, make)
    after = client.stats
    num_tokens = after.num_generation_tokens - before.num_generation_tokens
    return num_tokens, after.num_prompt_tokens - before.num_prompt_tokens


@pytest.mark.reliability
@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "done", "finished"])
def test_an_abort_in_any_state_frees_the_request(bench, state):
    async def main(client, make):
        for _ in range(5):  # a busy machine may hold this process up until the engine is done
            num_tokens, num_prompt_tokens = await abort_in(state, client, make)
            # It would have made 1900 tokens, or at least finished its prompt.
            if num_tokens < 500 and num_prompt_tokens < 100:
                return
        raise AssertionError("the engine went on each time")

    bench.run(main)


@pytest.mark.reliability
def test_a_full_queue_refuses_at_once_and_exactly(bench):
    async def main(client, make):
        def submit():
            return client.submit(make([3] * 20, greedy(200)))

        # Two places to run, three to wait: all at once, and one by one after running ones.
        for is_burst in (True, False):
            streams = []
            for _ in range(5):
                streams.append(submit())
                if not is_burst and len(streams) <= 2:
                    await anext(streams[-1])
            assert client.num_waiting == 3
            for count in (1, 2):
                with pytest.raises(QueueFullError) as caught:
                    client.check_room(count)
            with pytest.raises(QueueFullError):
                submit()
            assert 1 <= caught.value.retry_after_s <= 60
            client.abort(streams[4].request)
            assert client.num_waiting == 2
            client.check_room(1)
            with pytest.raises(QueueFullError):
                client.check_room(2)
            streams.append(submit())
            for stream in streams:
                await read(stream)
            ends = [stream.request.finish_reason for stream in streams]
            assert ends == ["length"] * 4 + ["abort", "length"]
            await wait_idle(client, make)

    bench.run(main)


@pytest.mark.reliability
def test_a_grammar_that_cannot_be_enforced_fails_its_own_request(bench):
    async def main(client, make):
        other = client.submit(make("a", greedy(30)))
        broken, sound = make("a", greedy(5)), make("a", greedy(5))
        broken.grammar = GrammarSpec('{"grammars": [{"lark_grammar": "start: missing"}]}')
        sound.grammar = GrammarSpec('{"grammars": [{"lark_grammar": "start: /[a-z]{3}/"}]}')
        with pytest.raises(InvalidRequestError, match="missing") as caught:
            await read(client.submit(broken))
        assert caught.value.code == "invalid_schema"
        assert broken.finish_reason == "error"
        await read(client.submit(sound))
        assert sound.finish_reason in ("length", "stop")
        assert (await read(other))[-1].finish_reason == "length"

    bench.run(main)


@pytest.mark.reliability
def test_who_waits_is_known_from_what_the_engine_says():
    """Also where the cache, not the rows, is what the requests wait for."""
    client = make_client(max_waiting=2)
    client._on_message(Ready(fake_info(max_num_seqs=4)))
    client._supervisor.state = EngineState.READY

    def submit():
        request = Request("r", [1], SamplingParams(), 0, 0, frozenset(), 8)
        client.submit(request)
        return request

    requests = [submit() for _ in range(6)]
    assert (client.num_waiting, client.num_running) == (2, 0), "four will find a place"
    with pytest.raises(QueueFullError):
        submit()
    for request in requests[3:]:
        client.abort(request)
    assert client.num_waiting == 0
    client._on_message(Outputs(0.0, 2, (Entered(1, 0),), ()))
    assert (client.num_waiting, client.num_running) == (2, 1), "the older one had no room"
    with pytest.raises(QueueFullError):
        submit()
    client._on_message(Outputs(0.0, 3, (Entered(2, 0),), (Delta(1, (5,), (), "length"),)))
    assert (client.num_waiting, client.num_running) == (1, 1)
    submit()
    with pytest.raises(QueueFullError):
        submit()
    client._on_message(Refused(7, ErrorInfo("OutOfMemoryError", "never")))
    client._on_message(Outputs(0.0, 3, (Entered(3, 0),), (Delta(4, (5,), (), "length"),)))
    assert (client.num_waiting, client.num_running) == (0, 2)


@pytest.mark.reliability
def test_cancels_by_the_hundred_leave_nothing_behind(bench):
    async def main(client, make):
        rng = random.Random(5)
        before = descriptors()
        whole = make("the thin man", greedy(30))
        await read(client.submit(whole))
        num_cancelled = num_answered = 0
        while num_cancelled < 500:
            requests = [
                make([rng.randrange(200)] * rng.randrange(1, 90), greedy(rng.randrange(1, 40)))
                for _ in range(4)
            ]
            streams = [client.submit(request) for request in requests]
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0.0005)
            for stream in streams:
                client.abort(stream.request)
                num_cancelled += 1
            if num_cancelled % 100 == 0:
                mixed = make("the thin man", greedy(30))
                stream = client.submit(mixed)
                await read(stream)
                num_answered += 1
                assert mixed.output_token_ids == whole.output_token_ids
        await wait_idle(client, make)
        assert num_answered == 5
        assert descriptors() == before

    bench.run(main)


@pytest.mark.reliability
def test_a_reader_that_is_cancelled_and_aborts_disturbs_nobody(bench):
    async def main(client, make):
        async def reader(request):
            try:
                await read(client.submit(request))
            finally:
                client.abort(request)

        kept = make("the thin man", greedy(50))
        keeping = asyncio.create_task(reader(kept))
        left = [asyncio.create_task(reader(make("a", greedy(500)))) for _ in range(3)]
        await asyncio.sleep(0.02)
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        await keeping
        assert kept.finish_reason == "length"
        assert len(kept.output_token_ids) == 50

    bench.run(main)


def test_counters_add_up(bench):
    async def main(client, make):
        await client.forget()  # its answer comes after what was counted before
        heard = []
        client.on_stats = heard.append
        before = client.stats
        for _ in range(3):
            await read(client.submit(make([4] * 20, greedy(7))))
        await wait_idle(client, make)  # one more token after a prompt of two
        # The counters of its last step come up to 0.1 s after its token.
        enough = before.num_generation_tokens + 22
        await wait_until(lambda: client.stats.num_generation_tokens >= enough)
        client.on_stats = None
        return before, client.stats, heard

    before, after, heard = bench.run(main)
    assert after.num_generation_tokens - before.num_generation_tokens == 21 + 1
    assert after.num_prompt_tokens - before.num_prompt_tokens == 60 + 2
    assert after.prefix_queries - before.prefix_queries == 60 + 2
    # A prompt of 20 takes two steps of 16 tokens at most.
    assert after.num_steps - before.num_steps == 3 * 8 + 1
    assert after.step_seconds > before.step_seconds
    assert sum(sum(stats.iteration_tokens) for stats in heard) == 81 + 3
    assert after.num_preemptions == after.num_nonfinite == 0


def test_an_engine_forgets_what_it_counted_and_kept(bench):
    prompt = [(3 * i) % 250 for i in range(90)]

    async def cached(client, make):
        stream = client.submit(make(prompt, greedy(2)))
        await read(stream)
        await wait_idle(client, make)
        return stream.request.num_cached

    async def main(client, make):
        hits = [await cached(client, make) for _ in range(2)]
        await client.forget()
        totals = client.stats
        return [*hits, await cached(client, make)], totals, client.stats

    hits, totals, after = bench.run(main)
    assert hits == [0, 64, 0]
    assert totals == EngineStats()
    assert 90 <= after.num_prompt_tokens < 180
