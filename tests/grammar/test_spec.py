"""Grammars: every kind of form, where an answer may end, hostile schemas, random schemas."""

import json
from collections import Counter

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.grammar_walk import CONTEXT, Walker, allowed, mask
from tests.tiny_llm import DATA
from tiercel.errors import ArgumentError, InvalidRequestError
from tiercel.grammar import json_schema
from tiercel.grammar import matcher as grammar_matcher
from tiercel.grammar.json_schema import check_schema
from tiercel.grammar.matcher import GrammarVocabulary, grammar_error
from tiercel.grammar.spec import ThinkingForm, compile_spec
from tiercel.models.source import open_source
from tiercel.params import LIMITS, SamplingParams, StructuredOutputs
from tiercel.request.inputs import InputProcessor

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "value": {"$ref": "#/$defs/v"}},
    "required": ["value"],
    "additionalProperties": False,
    "$defs": {"v": {"enum": [1, "two", None]}},
}
# form, texts that it takes, texts that it refuses
FORMS = {
    "schema": (
        {"json": PERSON},
        ['{"name": "Ada", "age": 36}', '{"name":"","age":0}', '{\n  "name": "é😀",\n  "age": 1\n}'],
        ["{}", '{"name": "A"}', '{"name": "A", "age": -1}', '{"age": 1, "name": "A"}', "36",
         '{"name": "A", "age": 3} ', ' {"name": "A", "age": 3}', '{"name": "A", "age": 1, "x": 2}',
         '{"name": "A", "age":' + "\n" * 9 + "3}"],
    ),
    "schema as text": ({"json": json.dumps(PERSON)}, ['{"name":"a","age":1}'], ["{}"]),
    "any JSON": ({"json": True}, ["[1, null]", '"a"', "-1.5e3", "{}"], ["nan", "[1,]", ""]),
    "recursion": (
        {"json": TREE},
        ['{"value": 1}', '{"left": {"left": {"value": null}, "value": 1}, "value": "two"}'],
        ['{"left": {}, "value": 1}', '{"value": 2}'],
    ),
    "object": ({"json_object": True}, ["{}", '{"a": [{"b": null}]}'], ["[]", "1", "null"]),
    "regex": (
        {"regex": r"[A-Z]{2}/\d{2,3}\.|é+"},
        ["AB/12.", "ZZ/123.", "éé"],
        ["AB/1.", "ab/12.", "AB/12.x", "AB/\uff11\uff12.", ""],
    ),
    "anchored regex": ({"regex": "^a\nb$"}, ["a\nb"], ["a", "xa\nb"]),
    "classes": ({"regex": r"[\d\-]\\\w\/[\W]"}, [r"5\a/-", r"-\_/é"], [r"\d\a/-", r"5\é/-"]),
    "choice": (
        {"choice": ["yes", "no", 'a "b"/\\\n', "yes!"]},
        ["yes", "yes!", 'a "b"/\\\n'],
        ["ye", "yess", "a"],
    ),
    "grammar": (
        {"grammar": 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/'},
        ["1", "12+3", "1+2+3"],
        ["", "+", "1+", "a"],
    ),
}  # fmt: skip
MODELS = ("qwen3-tiny", "gemma3-tiny", "llama-tiny")


@pytest.fixture(scope="module", params=MODELS)
def walker(request):
    return make_walker(request.param)


@pytest.fixture(scope="module")
def tiny():
    return make_walker("llama-tiny")


@pytest.fixture(scope="module")
def smollm(default_model):
    source = open_source(default_model)
    return Walker(source.tokenizer(None), source.config.vocab_size)


def make_walker(name):
    source = open_source(DATA / f"{name}.gguf")
    return Walker(source.tokenizer(None), source.config.vocab_size)


def refused(**form):
    with pytest.raises(InvalidRequestError) as caught:
        compile_spec(StructuredOutputs(**form), max_tokens=CONTEXT)
    return caught.value


@pytest.mark.parametrize("kind", FORMS)
def test_forms(walker, kind):
    form, right, wrong = FORMS[kind]
    for text in right:
        assert walker.accepts(walker.matcher(**form), text), text
    for text in wrong:
        assert not walker.accepts(walker.matcher(**form), text), text


@pytest.mark.parametrize("kind", FORMS)
def test_forms_with_a_real_vocabulary(smollm, kind):
    form, right, wrong = FORMS[kind]
    assert all(smollm.accepts(smollm.matcher(**form), text) for text in right)
    assert not any(smollm.accepts(smollm.matcher(**form), text) for text in wrong)


def test_an_answer_ends_exactly_where_its_grammar_may(tiny):
    stops = sorted(tiny.vocabulary.stop_ids)
    assert len(stops) == 2  # else one id could hide the other
    matcher = tiny.matcher(regex="ab?c?")
    may_end = []
    for token_id in tiny.ids("a") + tiny.ids("b"):
        may_end.append(set(stops) & set(allowed(matcher)))
        matcher.advance(token_id)
    assert may_end == [set(), set(stops)]
    assert set(allowed(matcher)) == {*stops, *tiny.ids("c")}
    assert not matcher.is_finished
    matcher.advance(tiny.ids("c")[0])
    assert matcher.is_finished
    assert list(allowed(matcher)) == stops  # nothing but an end may follow
    matcher.advance(stops[1])
    assert matcher.is_finished
    assert matcher.error is None


@pytest.mark.parametrize("text", ["z", "!"])  # one that the form may hold, and one that it may not
def test_a_requests_own_stop_ids_end_it_too(tiny, text):
    own = tiny.ids(text)[0]
    matcher = tiny.matcher(regex="[a-z]{2,3}", stop_ids=[own])
    assert own not in allowed(matcher)  # z could stand here, but it ends answers
    for token_id in tiny.ids("a") + tiny.ids("b"):
        matcher.advance(token_id)
    assert {own, *tiny.vocabulary.stop_ids} <= set(allowed(matcher))
    matcher.advance(own)
    assert matcher.is_finished


def test_a_stop_too_early_is_an_error(tiny):
    matcher = tiny.matcher(choice=["yes"])
    matcher.advance(min(tiny.vocabulary.stop_ids))
    assert matcher.error == "schema_too_complex"
    assert not matcher.is_finished


def test_a_token_that_does_not_fit_is_an_error(tiny):
    matcher = tiny.matcher(choice=["yes"])
    matcher.advance(tiny.ids("n")[0])
    assert matcher.error == "schema_too_complex"


def test_control_tokens_are_no_text(tiny):
    matcher = tiny.matcher(regex="(?s:.*)")
    found = set(allowed(matcher))
    assert found & set(tiny.tokenizer.control_tokens.values()) == set(tiny.vocabulary.stop_ids)
    assert not found & set(tiny.tokenizer.unused_ids)


def test_a_mask_is_as_wide_as_the_logits(tiny):
    padded = GrammarVocabulary.of(tiny.tokenizer, tiny.tokenizer.vocab_size + 100)
    spec = compile_spec(StructuredOutputs(regex="(?s:.*)"), max_tokens=CONTEXT)
    found = allowed(grammar_matcher.GrammarMatcher(padded, spec))
    assert padded.num_words == -(-(tiny.tokenizer.vocab_size + 100) // 32)
    assert found.max() < tiny.tokenizer.vocab_size


def test_drafts_are_judged_and_taken_back(tiny):
    stop = min(tiny.vocabulary.stop_ids)
    matcher = tiny.matcher(json=PERSON)
    ids = [*tiny.ids('{"name": "a", "age": 1}'), stop]
    before = mask(matcher)
    assert matcher.num_valid(ids) == len(ids)
    assert matcher.num_valid([*ids, stop]) == len(ids)
    assert matcher.num_valid([*ids[:3], stop]) == 3
    assert matcher.num_valid([*ids[:3], *tiny.ids("#"), stop]) == 3
    assert (mask(matcher) == before).all()
    masks = [before]
    for token_id in ids:
        matcher.advance(token_id)
        masks.append(mask(matcher))
    for taken in range(len(ids), -1, -1):
        assert (mask(matcher) == masks[taken]).all(), taken
        if taken:
            matcher.rollback(1)
    for token_id in ids:
        matcher.advance(token_id)
    matcher.rollback(len(ids))
    assert (mask(matcher) == before).all()


def test_a_step_that_takes_too_long_ends_the_request(tiny, monkeypatch):
    matcher = tiny.matcher(json=PERSON)
    matcher.advance(tiny.ids("{")[0])
    times = iter((0.0, 0.9, 1.0, 2.1))
    monkeypatch.setattr(grammar_matcher, "perf_counter", lambda: next(times))
    mask(matcher)
    assert not matcher.is_late
    mask(matcher)
    assert matcher.is_late
    assert matcher.error is None, "what depends on a clock is no fault of the form"


def test_a_grammar_that_exhausts_its_limits_ends_alone(tiny):
    nested = tiny.matcher(regex="((a{0,1000}){0,1000}){0,1000}")
    other = tiny.matcher(regex="((a{0,1000}){0,1000}){0,1000}")
    for _ in range(200):
        nested.advance(tiny.ids("a")[0])
        mask(nested)
        if nested.error:
            break
    assert nested.error == "schema_too_complex"
    assert tiny.ids("a")[0] in allowed(other)
    assert other.error is None


THINK = {"opening": "<think>", "closing": "</think>"}


def test_a_form_begins_behind_the_thinking(tiny):
    form = StructuredOutputs(choice=["yes", "no"])
    open_spec = compile_spec(form, max_tokens=CONTEXT, thinking=ThinkingForm(**THINK, is_open=True))
    for text in ("hm</think>yes", "</think>\n\nno", "yes <think> {</think>\nyes"):
        assert tiny.accepts(tiny.matcher(open_spec), text), text
    for text in ("yes", "<think></think>", "a</think>maybe", "a</think>\n\n\n\n\nyes"):
        assert not tiny.accepts(tiny.matcher(open_spec), text), text
    maybe_spec = compile_spec(
        form, max_tokens=CONTEXT, thinking=ThinkingForm(**THINK, is_open=False)
    )
    for text in ("yes", "<think>a</think>yes", "\n<think>\na\n</think>\n\nno"):
        assert tiny.accepts(tiny.matcher(maybe_spec), text), text
    for text in ("<think>yes", "a</think>yes", "maybe"):
        assert not tiny.accepts(tiny.matcher(maybe_spec), text), text


def test_the_end_of_thinking_may_be_a_control_token(tiny):
    name = next(
        n for n, i in tiny.tokenizer.control_tokens.items() if i not in tiny.vocabulary.stop_ids
    )
    thinking = ThinkingForm(opening="<think>", closing=name, is_open=True)
    spec = compile_spec(
        StructuredOutputs(choice=["yes"]),
        max_tokens=CONTEXT,
        thinking=thinking,
        control_tokens=tiny.tokenizer.control_tokens,
    )
    assert tiny.accepts(tiny.matcher(spec), f"hm{name}yes", parse_special=True)
    assert not tiny.accepts(tiny.matcher(spec), f"hm{name}yes")  # spelled out, it is thinking
    assert not tiny.accepts(tiny.matcher(spec), f"hm{name}no", parse_special=True)


def test_nothing_asked_is_no_grammar():
    assert compile_spec(None, max_tokens=CONTEXT) is None


def deep(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE = {
    "unknown type": ({"type": "foo"}, "invalid_schema", "foo"),
    "remote reference": ({"$ref": "https://example.com/s"}, "invalid_schema", r"\$ref"),
    "file reference": ({"$ref": "file:///etc/passwd"}, "invalid_schema", r"\$ref"),
    "relative reference": ({"items": {"$ref": "other.json#/a"}}, "invalid_schema", r"\$ref"),
    "reference to itself": ({"$ref": "#"}, "invalid_schema", r"\$ref"),
    "circle of references": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "invalid_schema",
        r"\$ref",
    ),
    "dangling": ({"$ref": "#/$defs/x"}, "invalid_schema", r"\$ref"),
    "400 levels": (deep(400), "schema_too_complex", "32 levels"),
    "deep data": ({"const": json.loads("[" * 400 + "]" * 400)}, "schema_too_complex", "32"),
    "long enum": ({"enum": list(range(30_000))}, "schema_too_complex", "5000 values"),
    "enum of 200,000": ({"enum": list(range(200_000))}, "schema_too_complex", "bytes"),
    "minItems": ({"type": "array", "minItems": 10**12}, "schema_too_complex", "minItems"),
    "minLength": ({"type": "string", "minLength": 10**9}, "schema_too_complex", "minLength"),
    "minProperties": ({"minProperties": 1e300}, "schema_too_complex", "minProperties"),
    "empty range": ({"type": "integer", "minimum": 5, "maximum": 3}, "invalid_schema", "minimum"),
    "nothing": (False, "invalid_schema", "enforced"),
    "uniqueItems": ({"uniqueItems": True}, "invalid_schema", "uniqueItems"),
    "if": ({"if": {"type": "integer"}, "then": {}}, "invalid_schema", "if"),
    "look-around": ({"type": "string", "pattern": "(?=a)b"}, "invalid_schema", "look-around"),
    "multipleOf": ({"multipleOf": 1_000_003}, "schema_too_complex", "multipleOf"),
    "long pattern": ({"type": "string", "pattern": "a" * 5000}, "schema_too_complex", "pattern"),
    "broken pattern": ({"type": "string", "pattern": "(a"}, "invalid_schema", "unclosed"),
    "wrong keyword": ({"minLength": "3"}, "invalid_schema", "minLength"),
    "ref chain": (
        {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(900)}},
        "schema_too_complex",
        r"\$ref",
    ),
}  # fmt: skip


@pytest.fixture
def work(monkeypatch):
    """What a form costs: values of a schema that are looked at, and grammars that are compiled."""
    counts = Counter()
    walk, build = json_schema._walk, grammar_matcher.GrammarMatcher.__init__

    def counted_walk(schema):
        for entry in walk(schema):
            counts["values"] += 1
            yield entry

    def counted_build(self, *args, **options):
        counts["grammars"] += 1
        build(self, *args, **options)

    monkeypatch.setattr(json_schema, "_walk", counted_walk)
    monkeypatch.setattr(grammar_matcher.GrammarMatcher, "__init__", counted_build)
    return counts


@pytest.mark.reliability
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas(tiny, name, work):
    schema, code, words = HOSTILE[name]
    with pytest.raises((InvalidRequestError, ArgumentError), match=words) as caught:
        tiny.matcher(json=schema)
    assert work["values"] <= LIMITS.max_schema_nodes + 1
    assert work["grammars"] <= (code == "invalid_schema"), "too much is refused before it is read"
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.reliability
@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?<=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreference"),
        ({"grammar": "start: other"}, "other"),
        ({"grammar": "no grammar"}, "Expected"),
        ({"grammar": "start: <|im_end|>"}, "no answer"),
        ({"grammar": "start: @user"}, "no answer"),
    ],
)
def test_hostile_sources(tiny, form, words, work):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        tiny.matcher(**form)
    assert work["grammars"] == 1
    assert caught.value.code == "invalid_schema"


def test_a_form_without_end_is_ended_by_the_limit_of_tokens(tiny):
    matcher = tiny.matcher(regex="[ab]{1000000}")
    for _ in range(30):
        assert not set(allowed(matcher)) & tiny.vocabulary.stop_ids
        matcher.advance(tiny.ids("a")[0])
    assert matcher.error is None


def test_words_in_data_are_no_keywords():
    check_schema({"const": {"$ref": "https://x", "minItems": 10**9}}, CONTEXT)
    check_schema({"properties": {"$ref": {"type": "string"}, "minItems": {}}}, CONTEXT)
    check_schema({"default": {"multipleOf": 10**9}}, CONTEXT)


def test_limits_are_exact():
    assert check_schema({"enum": list(range(LIMITS.max_schema_nodes - 2))}, CONTEXT) == 5000
    assert refused(json={"enum": list(range(LIMITS.max_schema_nodes - 1))}).code
    check_schema(deep(LIMITS.max_schema_depth // 1 - 2), CONTEXT)
    assert refused(json=deep(LIMITS.max_schema_depth)).code == "schema_too_complex"
    check_schema({"minItems": CONTEXT}, CONTEXT)
    assert refused(json={"minItems": CONTEXT + 1}).code == "schema_too_complex"


def test_x_guidance_is_ours(tiny):
    matcher = tiny.matcher(
        json={**PERSON, "x-guidance": {"whitespace_pattern": "x*", "lenient": True}}
    )
    assert tiny.accepts(matcher, '{"name": "a", "age": 1}')
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        tiny.matcher(json={"uniqueItems": True, "x-guidance": {"lenient": True}})


def test_messages_of_the_compiler_become_one_line():
    assert str(grammar_error('at 1(8): unknown name: "b"\n   1 | start: b\n<non-verbose/>')) == (
        'the form cannot be enforced: unknown name: "b".'
    )
    assert grammar_error("lexer error: too many states: 1 >= 1").code == "schema_too_complex"


def test_the_input_processor_compiles(tiny):
    tokenizer = tiny.tokenizer
    inputs = InputProcessor(tokenizer, vocab_size=272, max_position=512, max_model_len=128, seed=0)
    params = SamplingParams(structured_outputs=StructuredOutputs(json=PERSON), ignore_eos=True)
    first, second = (inputs.request([1], params, stream) for stream in range(2))
    assert first.grammar == compile_spec(params.structured_outputs, max_tokens=128)
    assert second.grammar is first.grammar  # compiled once for all answers
    assert first.stop_ids == set(tokenizer.stop_ids)  # a form ends whatever ignore_eos says
    given = compile_spec(StructuredOutputs(choice=["a"]), max_tokens=128)
    assert inputs.request([1], params, 0, grammar=given).grammar is given
    assert inputs.request([1], SamplingParams(), 0).grammar is None
    with pytest.raises(InvalidRequestError, match="minItems") as caught:
        inputs.request(
            [1], SamplingParams(structured_outputs=StructuredOutputs(json={"minItems": 129})), 0
        )
    assert caught.value.param == "structured_outputs"


def schemas():
    names = st.sampled_from(["a", "b", "long name", "é", 'q"\\'])
    scalars = st.one_of(
        st.just({"type": "null"}),
        st.just({"type": "boolean"}),
        st.builds(
            lambda low, extra: {"type": "integer", "minimum": low, "maximum": low + extra},
            st.integers(-50, 50),
            st.integers(0, 2000),
        ),
        st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 12)),
        st.just({"type": "string", "pattern": "^[a-c]{1,4}x?$"}),
        st.builds(
            lambda values: {"enum": values},
            st.lists(st.sampled_from([1, -2.5, "x", "é", None, True]), min_size=1, unique_by=repr),
        ),
        st.builds(lambda value: {"const": value}, st.sampled_from([3, "c", [1, {"k": None}]])),
    )

    def nested(inner):
        properties = st.dictionaries(names, inner, min_size=1, max_size=3)
        return st.one_of(
            st.builds(
                lambda props, cut: {
                    "type": "object",
                    "properties": props,
                    "required": sorted(props)[cut:],
                    "additionalProperties": False,
                },
                properties,
                st.integers(0, 2),
            ),
            st.builds(
                lambda item, low, more: {
                    "type": "array", "items": item, "minItems": low, "maxItems": low + more
                },
                inner,
                st.integers(0, 2),
                st.integers(0, 2),
            ),
            st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
            st.builds(lambda one: {"$ref": "#/$defs/d", "$defs": {"d": one}}, scalars),
        )  # fmt: skip

    # References lead to the root's definitions, so only a root may have any.
    return st.recursive(scalars, nested, max_leaves=6).filter(
        lambda schema: '"$ref"' not in json.dumps(schema) or "$ref" in schema
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas(), seed=st.integers(0, 2**32 - 1))
def test_random_answers_satisfy_random_schemas(smollm, schema, seed):
    matcher = smollm.matcher(json=schema)
    ids, is_done = smollm.sample(matcher, np.random.default_rng(seed))
    if is_done:
        value = json.loads(smollm.tokenizer.decode(ids))
        jsonschema_rs.validator_for(schema).validate(value)


def test_most_random_answers_come_to_an_end(smollm):
    rng = np.random.default_rng(1)
    ends = [smollm.sample(smollm.matcher(json=PERSON), rng)[1] for _ in range(20)]
    assert sum(ends) > 10  # else the test above would check nothing
