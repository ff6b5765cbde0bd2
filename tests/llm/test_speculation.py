"""Speculative decoding changes only the speed: the text is that of plain decoding in every case.

On the tiny models in float32, where equal logits are equal bits.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch

from tests.llm.test_busy_batch import run_alone, run_busy
from tests.mtp_model import mtp_model
from tests.tiny_llm import DATA, NAMES, assert_idle, greedy, ids_of, open_tiny
from tiercel.cache.allocator import NULL_BLOCK
from tiercel.engine import build as engine_module
from tiercel.errors import ArgumentError
from tiercel.params import SamplingParams
from tiercel.request.score_params import ScoreParams

METHODS = ("ngram", "mtp", "hybrid")
CASES = [*((name, "ngram") for name in NAMES), ("mtp", "mtp"), ("mtp", "hybrid")]
# By default with a window, and the drafter that has both others in it.
USUAL_CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] * (case not in (CASES[2], CASES[-1])))
    for case in CASES
]
NUM_REQUESTS = 48
DRAFTS = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 96,
    "max_model_len": 256,
}


@pytest.fixture(scope="session")
def path_of(tmp_path_factory):
    """The file of a tiny model; `mtp` has an MTP head."""
    path = mtp_model(tmp_path_factory.mktemp("models") / "mtp.gguf")
    return lambda name: path if name == "mtp" else DATA / f"{name}.gguf"


def counted(llm):
    """Counts of drafts and accepted tokens of all later steps, from the engine's results."""
    counts = {"drafts": 0, "right": 0, "steps": 0}
    collect = llm._engine.runner.collect

    def watched(launch):
        results = collect(launch)
        for result in results.values():
            counts["steps"] += 1
            counts["drafts"] += result.num_drafts
            counts["right"] += len(result.token_ids) - 1
        return results

    llm._engine.runner.collect = watched
    return counts


def some_prompts():
    """Texts that repeat themselves, and some that do not."""
    draw = random.Random(4)
    prompts = [[draw.randrange(5, 250) for _ in range(3 + 7 * i)] for i in range(5)]
    return [{"prompt_token_ids": ids} for ids in [*prompts, [7, 8, 9, 10, 11, 12] * 6]]


@pytest.fixture(scope="session")
def plain_of(path_of):
    """50 tokens after each prompt, without drafts, of a model."""

    @functools.cache
    def answer(name):
        with open_tiny(path_of(name)) as llm:
            return ids_of(llm.generate(some_prompts(), greedy(50)))

    return answer


# By default each number of drafts with and without overlap by turns.
DRAFT_CASES = [
    pytest.param(num, overlap, marks=[pytest.mark.slow] * is_rare)
    for num, overlap, is_rare in (
        (1, "1", False), (4, "0", False), (15, "1", False),
        (1, "0", True), (4, "1", True), (15, "0", True),
    )
]  # fmt: skip
OVERLAP = ["1", pytest.param("0", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("num_spec_tokens", "overlap"), DRAFT_CASES)
@pytest.mark.parametrize(("name", "spec"), CASES)
def test_greedy_answers_are_those_of_plain_decoding(
    monkeypatch, path_of, plain_of, name, spec, num_spec_tokens, overlap
):
    plain = plain_of(name)
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    with open_tiny(path_of(name), spec=spec, num_spec_tokens=num_spec_tokens) as llm:
        counts = counted(llm)
        assert ids_of(llm.generate(some_prompts(), greedy(50))) == plain
        assert_idle(llm)
    assert counts["drafts"] > 0
    assert 0 < counts["right"] <= counts["drafts"]


def busy_requests(llm, name):
    """Requests of all lengths, some with a common prefix, some with draft limits and noise."""
    draw = random.Random(name)
    prompts = [
        [draw.randrange(5, 250) for _ in range(draw.choice((1, 20, 60, 60, 62, 64, 65, 130, 200)))]
        for _ in range(NUM_REQUESTS - 8)
    ]
    prompts += [[*prompts[0], *prompts[i]][:200] for i in range(8)]
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=draw.choice((0.0, 0.0, 1.0)),
            max_tokens=draw.choice((1, 5, 20, 56)),
            num_spec_tokens=draw.choice((None, None, 0, 2)),
            seed=seed,
        )
        yield llm._inputs.request(prompt, params, 0)


@pytest.fixture(scope="session")
def alone_of(path_of):
    """The answer to each of these requests alone, without drafts, of a model."""

    @functools.cache
    def answers(name):
        with open_tiny(path_of(name), max_model_len=256) as llm:
            return [run_alone(llm, request) for request in busy_requests(llm, name)]

    return answers


@pytest.mark.parametrize("overlap", OVERLAP)
@pytest.mark.parametrize(("name", "spec"), USUAL_CASES)
def test_each_answer_of_a_busy_batch_is_the_one_it_gives_alone(
    monkeypatch, path_of, alone_of, name, spec, overlap
):
    """Random lengths and arrivals, aborts, draft limits, and preemptions."""
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    draw = random.Random(f"{name} {overlap} {spec}")
    alone = alone_of(name)
    sizes = engine_module.cache_blocks

    def few(groups, **options):
        return [min(size, 1 + 5) for size in sizes(groups, **options)]

    monkeypatch.setattr(engine_module, "cache_blocks", few)
    with open_tiny(path_of(name), spec=spec, num_spec_tokens=4, **DRAFTS) as llm:
        requests = list(busy_requests(llm, name))
        counts = counted(llm)
        aborted = run_busy(llm._engine, requests, draw)
        assert llm._engine.scheduler.num_preemptions > 0
        assert aborted
        assert counts["right"] > 0
        assert_idle(llm)
    for request, expected in zip(requests, alone, strict=True):
        got = request.output_token_ids
        assert got == (expected[: len(got)] if request in aborted else expected)


@pytest.mark.parametrize(("name", "spec"), USUAL_CASES)
def test_sampled_answers_are_the_same_draws(path_of, name, spec):
    """Noise belongs to a position of a text, so sampled answers are those of plain decoding."""
    params = SamplingParams(temperature=0.4, seed=3, max_tokens=60, ignore_eos=True, n=3)
    with open_tiny(path_of(name)) as llm:
        plain = ids_of(llm.generate(some_prompts(), params))
    with open_tiny(path_of(name), spec=spec) as llm:
        counts = counted(llm)
        assert ids_of(llm.generate(some_prompts(), params)) == plain
    assert counts["drafts"] > 0


def test_a_request_may_switch_it_off_or_lower_it():
    with open_tiny(DATA / "qwen3-tiny.gguf", spec="ngram", num_spec_tokens=4) as llm:
        collect, most = llm._engine.runner.collect, []

        def watched(launch):
            results = collect(launch)
            most.extend(result.num_drafts for result in results.values())
            return results

        llm._engine.runner.collect = watched
        answers = []
        for limit, highest in ((0, 0), (1, 1), (3, 3), (None, 4), (99, 4)):
            most.clear()
            answers.append(ids_of(llm.generate(some_prompts(), greedy(50, num_spec_tokens=limit))))
            assert max(most) == highest
        assert all(answer == answers[0] for answer in answers)


def test_guesses_leave_a_step_to_others_too():
    """15 draft tokens of a row would fill each step, yet answers, prompts and items continue."""
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 16, "max_model_len": 256}
    with open_tiny(DATA / "qwen3-tiny.gguf", spec="ngram", num_spec_tokens=15, **sizes) as llm:
        engine = llm._engine
        engine.runner.sampler._theta.zero_()  # draft even if drafts are mostly wrong
        users = [llm._inputs.request([7, 8, 9, 10 + i] * 4, greedy(200), 0) for i in range(4)]
        for request in users:
            engine.submit(request)
        for _ in range(12):
            engine.step()
        assert all(request.output_token_ids for request in users)
        for _ in range(4):
            before = [len(request.output_token_ids) for request in users]
            engine.step()
            after = [len(request.output_token_ids) for request in users]
            assert all(now > then for now, then in zip(after, before, strict=True))
        late = llm._inputs.request([5] * 20, greedy(1), 0)
        job = llm._frontend.score_job([5] * 20, [[6] * 10], ScoreParams(label_token_ids=[7]))
        (scoring,) = job.requests  # with the longest packed item
        for request in (late, scoring):
            engine.submit(request)
        for _ in range(15):
            engine.step()
        assert (late.finish_reason, scoring.finish_reason) == ("length", "length")
        assert llm.draft_counts.num_draft_tokens > 0
        for request in users:
            assert len(request.output_token_ids) < 200
            engine.abort(request)


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_an_answer_never_passes_its_limits(max_tokens):
    prompt = {"prompt_token_ids": [7, 8, 9, 10] * 5}
    with open_tiny(spec="ngram", num_spec_tokens=6, max_model_len=20 + max_tokens) as llm:
        (limited,) = llm.generate(prompt, greedy(max_tokens))
        (whole,) = llm.generate(
            prompt, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        )
    assert len(limited.outputs[0].token_ids) == max_tokens
    assert whole.outputs[0].token_ids == limited.outputs[0].token_ids
    assert limited.outputs[0].finish_reason == whole.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec": "mtp"}, "spec='mtp': llama-tiny.gguf has no layers for it. Use ngram"),
        ({"spec": "hybrid"}, "spec='hybrid': llama-tiny.gguf has no layers for it"),
        ({"spec": "guess"}, "spec='guess' is unknown. Use one of off, ngram, mtp, hybrid"),
        ({"spec": "ngram", "num_spec_tokens": 16}, "num_spec_tokens=16 is out of range"),
        ({"spec": "ngram", "num_spec_tokens": -1}, "num_spec_tokens=-1 is out of range"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ArgumentError) as caught:
        open_tiny(**options)
    assert message in f"{caught.value} {caught.value.hint}"


def first_drafts(path, spec, **options):
    """The first draft after each text that occurred, by the text."""
    found = {}
    with open_tiny(path, spec=spec, **options) as llm:
        engine = llm._engine
        engine.runner.sampler._theta.zero_()  # draft even if drafts are mostly wrong
        collect = engine.runner.collect
        texts = {}

        def watched(launch):
            results = collect(launch)
            for sampled in launch.sampled:
                for request in sampled.requests:
                    result = results[request]
                    text = texts.setdefault(request, list(request.prompt_token_ids))
                    text += result.token_ids
                    if result.next_drafts:
                        found.setdefault(tuple(text), result.next_drafts[0])
            return results

        engine.runner.collect = watched
        llm.generate(some_prompts(), greedy(30))
    return found


def test_the_head_sees_every_place_however_it_was_computed(path_of):
    """Its drafts depend only on the text, not on chunks or on the tokens that a step accepted."""
    path = path_of("mtp")
    whole = first_drafts(path, "mtp", num_spec_tokens=1)
    assert len(whole) > 100
    for options in (
        {"num_spec_tokens": 1, "max_num_batched_tokens": 7, "max_num_seqs": 2},
        {"num_spec_tokens": 6},
    ):
        other = first_drafts(path, "mtp", **options)
        shared = whole.keys() & other.keys()
        assert len(shared) > 50
        wrong = [text for text in shared if whole[text] != other[text]]
        assert not wrong


def test_the_head_sees_prompts_of_requests_that_do_not_draft(path_of):
    """Other requests find their blocks in the prefix cache, those of the head among them."""
    prompt = some_prompts()[4]["prompt_token_ids"] * 5
    with open_tiny(path_of("mtp"), spec="mtp", max_num_batched_tokens=96) as llm:
        engine, head = llm._engine, llm._engine.runner.pools[0].layers[2]

        def head_cache():
            request = llm._inputs.request(prompt, greedy(9), 0)
            engine.submit(request)
            while not request.output_token_ids:
                engine.step()
            blocks = request.block_ids[0]
            planes = [plane[blocks].flatten(0, 1)[:128].clone() for plane in head.values()]
            engine.abort(request)
            return request.num_cached, planes

        num_cached, expected = head_cache()
        assert num_cached == 0
        for run in (
            lambda: llm.generate({"prompt_token_ids": prompt}, greedy(2, num_spec_tokens=0)),
            lambda: llm.score(prompt, [[1, 2], [3]], label_token_ids=[4]),
        ):
            engine.forget()
            for plane in head.values():
                plane.zero_()
            run()
            num_cached, planes = head_cache()
            assert num_cached == 128
            for plane, wanted in zip(planes, expected, strict=True):
                torch.testing.assert_close(plane, wanted, rtol=1e-4, atol=1e-4)


def test_a_head_is_loaded_only_if_it_drafts(path_of):
    with open_tiny(path_of("mtp")) as llm:
        assert llm._engine.runner.model.draft_head is None
        assert len(llm._engine.runner.pools[0].layers) == 2
    with open_tiny(path_of("mtp"), spec="mtp") as llm:
        assert len(llm._engine.runner.pools[0].layers) == 3


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_counts_add_up(monkeypatch, overlap):
    """Also where steps sample tokens after a stop, and where they run for a row that has ended."""
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    # As long as 97 may not end it, an answer is made of 99: drafts go on as the prompt does.
    stop = {"logit_bias": {97: 100.0, 99: 50.0}, "stop_token_ids": (97,)}
    params = [SamplingParams(temperature=0, min_tokens=n, **stop) for n in range(4, 12)]
    with open_tiny(DATA / "qwen3-tiny.gguf", spec="ngram") as llm:
        llm._engine.runner.sampler._theta.zero_()  # draft even if drafts are mostly wrong
        outputs = llm.generate(some_prompts(), greedy(40))
        outputs += llm.generate([{"prompt_token_ids": [99] * 6 + [97] * 6}] * len(params), params)
        counts = llm.draft_counts
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert counts.num_trimmed_tokens > 0
    drawn = counts.num_steps + counts.num_accepted_tokens
    assert drawn - counts.num_trimmed_tokens == num_tokens
    assert sum(counts.accepted_per_pos) == counts.num_accepted_tokens <= counts.num_draft_tokens
    assert counts.accepted_per_pos == sorted(counts.accepted_per_pos, reverse=True)
    assert counts.num_drafts <= counts.num_steps


def live_cache(path, spec):
    """The cache contents after 40 tokens, by layer and plane: all positions that may be read."""
    few = SamplingParams(  # of few tokens: pairs recur, and the tokens after them are random
        temperature=0, frequency_penalty=1.9, max_tokens=60, allowed_token_ids=range(20, 26)
    )
    with open_tiny(path, spec=spec, num_spec_tokens=4) as llm:
        engine = llm._engine
        request = llm._inputs.request([7, 8, 9, 10, 11, 12] * 18, few, 0)
        engine.submit(request)
        while len(request.output_token_ids) < 40:
            engine.step()
        count = len(request.prompt_token_ids) + 39  # the last position may be computed or not
        found = {}
        for group, pool in enumerate(engine.runner.pools):
            is_held = [block != NULL_BLOCK for block in request.block_ids[group]]
            mask = torch.tensor(is_held).repeat_interleave(llm.config.block_size)[:count]
            for layer, planes in pool.layers.items():
                for name, plane in planes.items():
                    own = plane[request.block_ids[group]].flatten(0, 1)[:count]
                    found[group, layer, name] = own[mask].clone()
        right = llm.draft_counts.num_draft_tokens - llm.draft_counts.num_accepted_tokens
        engine.abort(request)
    return found, right


@pytest.mark.parametrize("name", ["llama-tiny", "gemma3-tiny"])
def test_a_rejected_draft_leaves_no_trace_in_the_cache(name):
    plain, _ = live_cache(DATA / f"{name}.gguf", "off")
    drafted, num_wrong = live_cache(DATA / f"{name}.gguf", "ngram")
    assert num_wrong > 0
    for key, expected in plain.items():
        count = min(len(expected), len(drafted[key]))
        assert count > 10
        # The windows of the two may begin a block apart.
        torch.testing.assert_close(drafted[key][-count:], expected[-count:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("overlap", OVERLAP)
def test_a_stop_string_at_every_place_leaks_nothing(monkeypatch, path_of, overlap):
    """Text, tokens, log-probabilities and streams end where those of plain decoding end."""
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    path, prompt = path_of("mtp"), some_prompts()[0]

    def answers(llm, stop):
        params = greedy(40, stop=[stop], logprobs=0)
        (output,) = llm.generate(prompt, params)
        whole = output.outputs[0]
        assert len(whole.logprobs) == len(whole.token_ids) == output.metrics.num_output_tokens
        deltas = list(llm.stream(prompt, params))
        streamed = "".join(delta.text for delta in deltas)
        ids = [token_id for delta in deltas for token_id in delta.token_ids]
        assert (streamed, ids) == (whole.text, whole.token_ids)
        assert sum(len(delta.logprobs or ()) for delta in deltas) == len(ids)
        return whole.text, whole.token_ids, whole.finish_reason, whole.stop_reason

    with open_tiny(path) as plain, open_tiny(path, spec="ngram") as drafted:
        text = plain.generate(prompt, greedy(40))[0].outputs[0].text
        stops = {text[i : i + n] for n in (1, 3) for i in range(len(text) - n)}
        stops = [stop for stop in sorted(stops) if "\ufffd" not in stop]
        assert len(stops) > 9
        reasons = {answers(drafted, stop) == answers(plain, stop) for stop in stops}
        assert reasons == {True}
        assert drafted.draft_counts.num_accepted_tokens > 0
        assert_idle(drafted)
