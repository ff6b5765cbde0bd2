"""`LLM` with structured outputs: valid to the last token, whatever the model would sample."""

import json
import re

import pytest

from tests.tiny_llm import DATA, NAMES, PROMPTS, assert_idle, greedy, open_tiny
from tiercel.errors import InvalidRequestError
from tiercel.grammar.matcher import GrammarMatcher
from tiercel.llm import LLM
from tiercel.params import SamplingParams, StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["tin", "zinc"]},
        "sizes": {"type": "array", "items": {"enum": [1, 22, 333]}, "maxItems": 3},
        "note": {"type": "string", "maxLength": 8},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
}


def is_valid(text):
    value = json.loads(text)
    sizes, note = value["sizes"], value.get("note", "")
    return (
        list(value) == ["kind", "sizes", "note"][: len(value)]
        and value["kind"] in ("tin", "zinc")
        and set(sizes) <= {1, 22, 333}
        and len(sizes) <= 3
        and len(note) <= 8
    )


def params(temperature=0.0, max_tokens=400, n=1, **form):
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        n=n,
        seed=1,
        ignore_eos=True,  # a form ends its answer all the same
        structured_outputs=StructuredOutputs(**form),
    )


@pytest.fixture(scope="module", params=NAMES)
def llm(request):
    with open_tiny(DATA / f"{request.param}.gguf") as model:
        yield model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_is_valid_to_the_end(llm, temperature):
    outputs = llm.generate(PROMPTS[:3], params(temperature, n=2, json=SCHEMA))
    for answer in (answer for output in outputs for answer in output.outputs):
        assert answer.finish_reason == "stop", answer
        assert answer.stop_reason in llm.tokenizer.stop_ids
        assert is_valid(answer.text), answer.text
    assert_idle(llm)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"choice": ["yes", "no", "maybe so"]}, "yes|no|maybe so"),
        ({"regex": r"[a-f]{2,4}-\d{3}"}, r"[a-f]{2,4}-\d{3}"),
        ({"grammar": 'start: N ("+" N){0,3}\nN: /[0-9]{1,3}/'}, r"\d{1,3}(\+\d{1,3}){0,3}"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_forms(llm, form, pattern, temperature):
    for output in llm.generate(PROMPTS, params(temperature, **form)):
        assert re.fullmatch(pattern, output.outputs[0].text)
        assert output.outputs[0].finish_reason == "stop"


def test_cut_by_the_limit_it_says_so(llm):
    answer = llm.generate("a", params(max_tokens=3, json=SCHEMA))[0].outputs[0]
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 3


def test_neighbours_without_a_form_are_not_touched(llm):
    free = greedy(24)
    alone = llm.generate(PROMPTS, free)
    forms = [params(json=SCHEMA), free, params(1.0, choice=["yes", "no"]), free, free]
    mixed = llm.generate(PROMPTS, forms)
    for place in (1, 3, 4):
        assert mixed[place].outputs[0].token_ids == alone[place].outputs[0].token_ids
    assert is_valid(mixed[0].outputs[0].text)
    assert mixed[2].outputs[0].text in ("yes", "no")


def test_a_form_whose_masks_take_too_long_ends_alone(llm, monkeypatch):
    fill = GrammarMatcher.fill_mask

    def late(matcher, row):
        fill(matcher, row)
        matcher.is_late = matcher.is_accepting

    monkeypatch.setattr(GrammarMatcher, "fill_mask", late)
    plain = greedy(9)
    shaped = greedy(9, structured_outputs=StructuredOutputs(regex="[a-z]{3,9}"))
    alone = llm.generate(PROMPTS[1], plain)[0].outputs[0]
    ended, other = (output.outputs[0] for output in llm.generate(PROMPTS[:2], [shaped, plain]))
    assert (ended.finish_reason, ended.stop_reason) == ("error", "schema_too_complex")
    assert ended.token_ids
    assert other.token_ids == alone.token_ids


def test_a_stream_has_the_same_answer(llm):
    whole = llm.generate("a", params(json=SCHEMA))[0].outputs[0]
    deltas = list(llm.stream("a", params(json=SCHEMA)))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("form", "code"),
    [
        ({"json": {"uniqueItems": True}}, "invalid_schema"),
        ({"json": {"minItems": 10**12}}, "schema_too_complex"),
        ({"regex": "(?=a)"}, "invalid_schema"),
    ],
)
def test_a_form_that_cannot_be_enforced_runs_nothing(llm, form, code):
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(["a", "b"], [greedy(), params(**form)])
    assert caught.value.code == code
    assert_idle(llm)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_default_model(default_model, temperature):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "country": {"type": "string"}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    with LLM(default_model, device="cpu", max_model_len=256) as llm:
        messages = [{"role": "user", "content": "Name a big city and its country, as JSON."}]
        answer = llm.chat(messages, params(temperature, max_tokens=100, json=schema)).outputs[0]
    assert answer.finish_reason == "stop", answer.text
    assert set(json.loads(answer.text)) == {"city", "country"}


SMALL_SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "maximum": 99, "minimum": 0},
        "b": {"enum": ["x", "y"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


def constrained(seed, **form):
    return SamplingParams(seed=seed, max_tokens=60, structured_outputs=StructuredOutputs(**form))


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_forms_hold_beside_free_answers(monkeypatch, overlap):
    """A grammar's rows wait for their last token; the others keep the pace."""
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    params = [
        constrained(1, json=SMALL_SCHEMA),
        SamplingParams(seed=2, max_tokens=30),
        constrained(3, regex="[ab]{3,5}c"),
        constrained(4, choice=["yes", "no"]),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    ]
    prompts = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(5)]
    with open_tiny() as llm:
        together = [o.outputs[0] for o in llm.generate(prompts, params)]
        alone = [
            llm.generate(prompt, own)[0].outputs[0]
            for prompt, own in zip(prompts, params, strict=True)
        ]
        assert_idle(llm)
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    value = json.loads(together[0].text)
    assert set(value) == {"a", "b"}
    assert re.fullmatch("[ab]{3,5}c", together[2].text)
    assert together[3].text in ("yes", "no")
    assert [o.finish_reason for o in together][:1] == ["stop"]
    assert len(together[4].token_ids) == 30


def test_a_form_that_cannot_be_is_refused_and_leaves_nothing_behind():
    with open_tiny() as llm:
        with pytest.raises(InvalidRequestError):
            llm.generate("a", constrained(1, json={"type": "nonsense"}))
        assert_idle(llm)
