"""DeepSeek-V4 with drafts gives the answers of plain decoding, whatever its requests ask for.

Requests echo random ids, so that n-grams recur, and the checkpoint's draft head is right now and
then (`write_repeating`).
"""

import functools
import random

import pytest

from tests.dsv4_engine import open_v4, poison_new_blocks, random_ids, with_blocks, write_repeating
from tests.tiny_llm import assert_idle, greedy, ids_of
from tiercel.params import SamplingParams, StructuredOutputs

METHODS = ("mtp", "hybrid", "ngram")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["no", "yes"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


# The hybrid drafts as both others do; where a model is opened several times it stands for them.
HYBRID_FIRST = ["hybrid", *(pytest.param(s, marks=pytest.mark.slow) for s in METHODS[:-1])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_repeating(tmp_path_factory.mktemp("repeating"), tokenizer=True)


def echoes(count, seed=0):
    """Prompts that say something twice; some reach over the end of a block."""
    draw = random.Random(seed)
    prompts = []
    for number in range(count):
        said = random_ids(draw.choice((4, 9, 30, 58, 62)), seed=100 * seed + number)
        prompts.append({"prompt_token_ids": [*said, *said[: draw.randrange(2, len(said) + 1)]]})
    return prompts


def open_drafting(folder, spec, **options):
    llm = open_v4(folder, spec=spec, **options)
    poison_new_blocks(llm)
    llm._engine.runner.sampler._theta.zero_()  # draft even if drafts are mostly wrong
    return llm


def assert_drafted(llm, *, is_rejecting=True):
    counts = llm.draft_counts
    assert 0 < counts.num_accepted_tokens <= counts.num_draft_tokens
    if is_rejecting:
        assert counts.num_accepted_tokens < counts.num_draft_tokens


@pytest.fixture(scope="module")
def plain_of(folder):
    """Answers without drafts."""

    @functools.cache
    def answers(count, length):
        with open_v4(folder, max_num_seqs=max(8, count)) as llm:
            return ids_of(llm.generate(echoes(count, count), greedy(length)))

    return answers


COUNTS = [6, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2, 16, 33, 64))]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("spec", METHODS)
def test_greedy_answers_are_those_of_plain_decoding(folder, plain_of, spec, count):
    length = 30 if count < 4 else 16
    with open_drafting(folder, spec, max_num_seqs=max(8, count), num_spec_tokens=4) as llm:
        answers = ids_of(llm.generate(echoes(count, count), greedy(length)))
        assert_drafted(llm)
        assert_idle(llm)
    assert answers == plain_of(count, length)


@pytest.mark.parametrize("num_spec_tokens", [pytest.param(1, marks=pytest.mark.slow), 15])
@pytest.mark.parametrize("spec", HYBRID_FIRST)
def test_few_and_many_drafts(folder, plain_of, spec, num_spec_tokens):
    with open_drafting(folder, spec, num_spec_tokens=num_spec_tokens) as llm:
        answers = ids_of(llm.generate(echoes(1, 1), greedy(30)))
        assert_drafted(llm, is_rejecting=num_spec_tokens > 1)
        assert_idle(llm)
    assert answers == plain_of(1, 30)


def several_params():
    """What requests ask for besides a greedy answer."""
    return [
        greedy(20, logprobs=3),
        greedy(20, n=2),
        SamplingParams(temperature=0, max_tokens=20, stop_token_ids=tuple(range(2, 131, 9))),
        SamplingParams(temperature=0.7, seed=5, max_tokens=20, ignore_eos=True, n=2),
        SamplingParams(temperature=1.0, seed=6, max_tokens=20, logprobs=2, top_k=9),
        greedy(20, repetition_penalty=1.3, num_spec_tokens=2),
        greedy(20, num_spec_tokens=0),
        greedy(20, allowed_token_ids=range(20, 40)),
    ]


def with_params(llm):
    prompts = echoes(8, seed=3)
    return llm.generate(prompts, several_params())


@pytest.mark.parametrize("spec", HYBRID_FIRST)
def test_requests_that_ask_for_more_than_a_greedy_answer(folder, spec):
    """Log-probabilities, several answers, stop tokens, seeds, penalties, draft limits: together."""
    with open_v4(folder) as llm:
        plain = with_params(llm)
    with open_drafting(folder, spec) as llm:
        drafted = with_params(llm)
        assert_drafted(llm)
        assert_idle(llm)
    assert ids_of(drafted) == ids_of(plain)
    reasons = {answer.finish_reason for output in plain for answer in output.outputs}
    assert reasons == {"length", "stop"}
    for ours, theirs in zip(drafted, plain, strict=True):
        for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert (mine.finish_reason, mine.stop_reason) == (
                other.finish_reason,
                other.stop_reason,
            )
            for entry, of in zip(mine.logprobs or (), other.logprobs or (), strict=True):
                assert entry.token_id == of.token_id
                assert entry.logprob == pytest.approx(of.logprob, abs=4e-4)


@pytest.mark.parametrize("spec", HYBRID_FIRST)
def test_a_schema_and_stop_strings(folder, spec):
    """The answers are text: a tokenizer of single characters."""
    prompts = ["say it: say it", '{"a": 1, "b": "no"} {"a": 1, ']
    schemed_params = [
        SamplingParams(
            temperature=0, max_tokens=20, structured_outputs=StructuredOutputs(json=SCHEMA)
        ),
        SamplingParams(
            temperature=0,
            max_tokens=30,
            structured_outputs=StructuredOutputs(json=SCHEMA),
            logprobs=1,
        ),
    ]

    def answers(llm):
        schemed = llm.generate(prompts, schemed_params)
        visible = {"allowed_token_ids": range(2, 96)}
        free = llm.generate(prompts, greedy(30, **visible))
        text = free[0].outputs[0].text
        stops = sorted({text[i : i + 2] for i in (2, 15)} | {text[20]})
        params = [greedy(30, stop=[stop], **visible) for stop in stops]
        stopped = llm.generate([prompts[0]] * len(stops), params)
        found = [*schemed, *free, *stopped]
        return [
            (a.text, a.token_ids, a.finish_reason, a.stop_reason)
            for output in found
            for a in output.outputs
        ]

    with open_v4(folder) as llm:
        plain = answers(llm)
    with open_drafting(folder, spec) as llm:
        assert answers(llm) == plain
        assert_drafted(llm)
        assert_idle(llm)
    assert any(reason == "stop" and of for _, _, reason, of in plain)


@pytest.mark.parametrize("spec", HYBRID_FIRST)
def test_preemption_and_hits_while_drafting(monkeypatch, folder, spec):
    """Requests that share a prefix over a block, and give way to each other."""
    shared, texts = random_ids(128, seed=1), [random_ids(60, seed=seed) for seed in range(4)]
    prompts = [[*shared, *said, *said[:57]] for said in texts[:2]]
    prompts = [
        {"prompt_token_ids": ids} for ids in (*prompts, texts[2] * 2, [*texts[3], *texts[3]])
    ]
    with open_v4(folder) as llm:
        plain = ids_of(llm.generate(prompts, greedy(24)))
    with_blocks(monkeypatch, full=6, sliding=6)
    with open_drafting(folder, spec, max_num_seqs=4, max_num_batched_tokens=96) as llm:
        assert ids_of(llm.generate(prompts, greedy(24))) == plain
        scheduler = llm._engine.scheduler
        assert scheduler.num_preemptions > 0
        assert scheduler.prefix_hits > 0
        assert_drafted(llm)
        assert_idle(llm)
