"""Structured outputs with drafts: the text of plain decoding in every combination, always valid."""

from __future__ import annotations

import functools
import json
import re
from itertools import product

import pytest
import torch

from tests.llm.test_speculation import METHODS, counted
from tests.mtp_model import mtp_model
from tests.serve.generation.tools.call_writers import Tool
from tests.tiny_llm import DATA, assert_idle, joined, open_tiny
from tiercel.grammar.spec import ThinkingForm, compile_spec
from tiercel.params import SamplingParams, StructuredOutputs
from tiercel.serve.generation.tools.tool_choice import make_tool_constraints
from tiercel.serve.generation.tools.tool_formats import FORMATS, SelectedFormat

SCHEMA = {
    "type": "object",
    "properties": {
        "sizes": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 9, "maxItems": 12},
        "kind": {"enum": ["tin", "zinc"]},
    },
    "required": ["sizes", "kind"],
    "additionalProperties": False,
}
FORMS = {
    "none": None,
    "schema": StructuredOutputs(json=SCHEMA),
    "regex": StructuredOutputs(regex=r"(ab|abc){8,12}-\d{3}"),
    "choice": StructuredOutputs(choice=["yes yes yes yes yes", "no no no no no", "maybe"]),
    "tool": None,
}
FEATURES = ("plain", "stream", "n", "stop", "logprobs", "prefix", "sampled", "bad words")
PROMPT = [7, 8, 9, 10, 11, 12] * 16
TEMPERATURE = {"n": 0.5, "sampled": 0.5}
THINKING_ENDS = 6.0  # added to the logit of the token that ends thinking


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Models without drafts, and one model for each drafter."""
    path = mtp_model(tmp_path_factory.mktemp("models") / "mtp.gguf")
    plain = DATA / "qwen3-tiny.gguf"
    opened = {
        "ngram": (open_tiny(plain), open_tiny(plain, spec="ngram")),
        "mtp": (open_tiny(path), open_tiny(path, spec="mtp")),
    }
    opened["hybrid"] = (opened["mtp"][0], open_tiny(path, spec="hybrid"))
    yield opened
    for pair in opened.values():
        for llm in pair:
            llm.close()


def tool_grammar():
    use = make_tool_constraints(
        SelectedFormat(FORMATS["hermes"], is_in_template=True),
        (Tool("act", SCHEMA),),
        choice="required",
        named=None,
        is_parallel=False,
        is_structured=False,
        max_tokens=500,
    )
    return compile_spec(None, max_tokens=500, calls=use)


def run(llm, form, feature):
    """The visible answer to a request with a form and a feature."""
    params = SamplingParams(
        temperature=TEMPERATURE.get(feature, 0.0),
        seed=2,
        max_tokens=80,
        n=3 if feature == "n" else 1,
        stop=["2, 2", "bab", "no n"] if feature == "stop" else [],
        logprobs=4 if feature == "logprobs" else None,
        bad_words=["22", "ab"] if feature == "bad words" and form == "none" else [],
        structured_outputs=FORMS[form],
    )
    if form == "tool":  # only the server makes such grammars
        spec = tool_grammar()
        request, inputs = llm._inputs.request, llm._inputs
        inputs.request = lambda *a, **k: request(*a, **(k | {"grammar": spec}))
    try:
        prompt = {"prompt_token_ids": PROMPT}
        if feature == "stream":
            deltas = list(llm.stream(prompt, params))
            return [("".join(d.text for d in deltas), joined(deltas, "token_ids"),
                     deltas[-1].finish_reason, deltas[-1].stop_reason, None)]  # fmt: skip
        if feature == "prefix":
            llm.generate(prompt, params)
        (output,) = llm.generate(prompt, params)
        if feature == "prefix":
            assert output.metrics.num_cached_tokens == 64
        return [(a.text, a.token_ids, a.finish_reason, a.stop_reason, a.logprobs)
                for a in output.outputs]  # fmt: skip
    finally:
        if form == "tool":
            inputs.request = request


def check_form(form, text):
    if form == "schema":
        assert set(json.loads(text)["sizes"]) <= {1, 22, 333}
    elif form == "tool":
        body = re.fullmatch(r"\s*<tool_call>(.*)</tool_call>\s*", text, re.DOTALL)
        assert json.loads(body[1])["name"] == "act"
    elif form == "regex":
        assert re.fullmatch(r"(ab|abc){8,12}-\d{3}", text)
    elif form == "choice":
        assert text in FORMS["choice"].choice


@pytest.fixture(scope="module")
def expected_of():
    """The answers of a model without drafts; two drafters share one model."""
    return functools.cache(run)


def combinations():
    """All combinations; by default a sixth: forms and features meet each drafter, in turn."""
    for places in product(*(range(len(values)) for values in (FORMS, FEATURES, METHODS))):
        case = (list(FORMS)[places[0]], FEATURES[places[1]], METHODS[places[2]])
        yield pytest.param(*case, marks=[pytest.mark.slow] * (sum(places) % 6 > 0))


@pytest.mark.parametrize(("form", "feature", "spec"), list(combinations()))
def test_the_answer_is_that_of_plain_decoding(engines, expected_of, form, feature, spec):
    plain, llm = engines[spec]
    expected = expected_of(plain, form, feature)
    collect, counts = llm._engine.runner.collect, counted(llm)
    try:
        answers = run(llm, form, feature)
    finally:
        llm._engine.runner.collect = collect
    assert_idle(llm)
    assert counts["drafts"] > 0 or form == "choice" or feature == "stop"  # short answers
    for answer, plain in zip(answers, expected, strict=True):
        assert answer[:4] == plain[:4]
        if feature != "stop" and answer[2] == "stop":
            check_form(form, answer[0])
        if feature == "logprobs":
            assert len(answer[4]) == len(answer[1])
            for entry, alone in zip(answer[4], plain[4], strict=True):
                assert entry.token_id == alone.token_id
                assert entry.logprob == pytest.approx(alone.logprob, abs=1e-4)
                assert [t for t, _ in entry.top] == [t for t, _ in alone.top]


@pytest.mark.parametrize("spec", METHODS)
def test_forms_are_drafted_too(engines, spec):
    """Where the form repeats itself, drafts are accepted although each position has a mask."""
    _, llm = engines[spec]
    collect, counts = llm._engine.runner.collect, counted(llm)
    try:
        run(llm, "schema", "plain")
    finally:
        llm._engine.runner.collect = collect
    assert counts["right"] > 0


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("overlap", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_forms_and_free_texts_together(monkeypatch, tmp_path, spec, overlap):
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    every = [
        SamplingParams(temperature=t, seed=i, max_tokens=60, structured_outputs=form)
        for i, (form, t) in enumerate(product(FORMS.values(), (0.0, 0.6)))
    ]
    prompts = [{"prompt_token_ids": [*PROMPT, 5 + i]} for i in range(len(every))]
    answers = []
    path = DATA / "qwen3-tiny.gguf" if spec == "ngram" else mtp_model(tmp_path / "mtp.gguf")
    for method in ("off", spec):
        with open_tiny(path, spec=method) as llm:
            outputs = llm.generate(prompts, every)
            answers.append([output.outputs[0].token_ids for output in outputs])
            assert_idle(llm)
    assert answers[0] == answers[1]


def think_then_choose(llm, seed):
    """An answer that thinks until a control token and then follows a form, and that token."""
    tokenizer = llm._inputs._tokenizer
    names = tokenizer.control_tokens
    name = next(name for name, i in names.items() if i not in tokenizer.stop_ids)
    spec = compile_spec(
        StructuredOutputs(choice=["yes, yes, yes, yes", "no, no, no, no"]),
        max_tokens=500,
        thinking=ThinkingForm(opening="<think>", closing=name, is_open=True),
        control_tokens=names,
    )
    params = SamplingParams(
        temperature=2.0, seed=seed, max_tokens=60, logit_bias={names[name]: THINKING_ENDS}
    )
    inputs, request = llm._inputs, llm._inputs.request
    inputs.request = lambda *a, **k: request(*a, **(k | {"grammar": spec}))
    try:
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, params)
    finally:
        inputs.request = request
    return output.outputs[0], names[name]


@pytest.mark.parametrize("spec", METHODS)
def test_thinking_ends_at_each_place_of_a_draft(engines, monkeypatch, spec):
    """With drafts that are all accepted, which begin a token later each time."""
    plain, llm = engines[spec]
    most = llm.config.spec.max_drafts
    for seed in range(200):
        expected, closing = think_then_choose(plain, seed)
        tokens = expected.token_ids
        if closing in tokens[3 + most :] and expected.finish_reason == "stop":
            break
    else:
        pytest.fail("no answer that thinks and ends")
    rows, proposer = llm._engine.runner.rows, llm._engine.runner.proposer
    propose, collect = proposer.propose, llm._engine.runner.collect
    places, num_steps, num_skipped = set(), 0, 0

    def propose_what_follows(at, states):
        nonlocal num_steps
        propose(at, states)
        num_steps += 1
        (row,) = at.tolist()
        place = int(rows.num_tokens[row]) - len(PROMPT)
        ahead = tokens[place : place + most] if num_steps > num_skipped else []
        rows.drafts.draft_ids[row, 0] = len(ahead)
        rows.drafts.draft_ids[row, 1 : 1 + len(ahead)] = torch.tensor(ahead, dtype=torch.int32)

    def watch(launch):
        results = collect(launch)
        places.update(r.token_ids.index(closing) for r in results.values()
                      if closing in r.token_ids and r.num_drafts == most)  # fmt: skip
        return results

    monkeypatch.setattr(proposer, "propose", propose_what_follows)
    monkeypatch.setattr(llm._engine.runner, "collect", watch)
    for count in range(1 + most):
        num_skipped, num_steps = count, 0
        answer, _ = think_then_choose(llm, seed)
        assert (answer.token_ids, answer.finish_reason) == (tokens, "stop")
        assert_idle(llm)
    assert places == set(range(1 + most))
