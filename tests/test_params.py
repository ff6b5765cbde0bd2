"""Sampling parameters and errors: every wrong value is refused by name, all can be pickled."""

import copy
import dataclasses
import inspect
import json
import pickle

import msgspec
import pytest

from tiercel import errors
from tiercel.errors import ArgumentError, ContextLengthError, InvalidRequestError, TiercelError
from tiercel.params import LIMITS, Limits, SamplingParams, StructuredOutputs

NAN, INF = float("nan"), float("inf")
NOT_INTEGERS = ("1", 1.5, True, None, [1], 10**5000, -(10**5000))
NOT_NUMBERS = ("1", True, None, [1.0], NAN, INF, -INF, 10**400, 10**5000)
NOT_STRINGS = (5, None, [5], [None], {"a"}, b"ab", [b"a"], [10**5000], "", ["a", ""], ["\ud800"])
NOT_IDS = ("5", 5, {5}, [-1], [1.0], [True], ["a"], [2**31], [10**5000])
WRONG = {
    "n": (*NOT_INTEGERS, 0, -1, 17),
    "temperature": (*NOT_NUMBERS, -0.1, 2.1, -1),
    "top_p": (*NOT_NUMBERS, 0, 0.0, -0.5, 1.01),
    "top_k": (*NOT_INTEGERS, -2),
    "min_p": (*NOT_NUMBERS, -0.01, 1.01),
    "seed": ("1", 1.5, True, [1], 10**5000, 2**63, -(2**63) - 1),
    "stop": (*NOT_STRINGS, ["x"] * 17, "x" * 1025),
    "stop_token_ids": (None, *NOT_IDS),
    "include_stop_str_in_output": (0, 1, "yes", None),
    "ignore_eos": (0, 1, "yes", None),
    "min_tokens": (*NOT_INTEGERS, -1, 2**31, 17),  # 17: above the default of max_tokens
    "max_tokens": ("1", 1.5, True, [1], 10**5000, 0, -1, 2**31),
    "logprobs": ("1", 1.5, True, [1], -1, 21),
    "prompt_logprobs": ("1", 1.5, True, [1], -1, 21),
    "num_spec_tokens": ("1", 1.5, True, [1], -1),
    "presence_penalty": (*NOT_NUMBERS, -2.1, 2.1),
    "frequency_penalty": (*NOT_NUMBERS, -2.1, 2.1),
    "repetition_penalty": (*NOT_NUMBERS, 0, 0.0, -1, 10.5),
    "logit_bias": (
        None,
        [(1, 2.0)],
        5,
        {"1": 1.0},
        {-1: 1.0},
        {1.0: 1.0},
        {True: 1.0},
        {1: 100.5},
        {1: -101},
        {1: NAN},
        {1: "1"},
        dict.fromkeys(range(1025), 1.0),
    ),
    "bad_words": (*NOT_STRINGS, "x" * 1025),
    "allowed_token_ids": (*NOT_IDS, []),
    "skip_special_tokens": (0, 1, "yes", None),
    "detokenize": (0, 1, "yes", None),
    "structured_outputs": ({}, {"json": {}}, "json", True, 5),
}
RIGHT = {
    "n": (1, 16),
    "temperature": (0, 0.0, 1, 2.0, 1e-30),
    "top_p": (1, 1.0, 1e-9),
    "top_k": (-1, 0, 1, 2**31 - 1),
    "min_p": (0, 0.0, 1.0),
    "seed": (None, 0, -1, 2**63 - 1, -(2**63)),
    "stop": ((), [], "x", ["x"] * 16, "x" * 1024, ("é", "\0")),
    "stop_token_ids": ((), [0], range(3), [2**31 - 1]),
    "min_tokens": (0, 16),
    "max_tokens": (None, 1, 2**31 - 1),
    "logprobs": (None, 0, 20),
    "prompt_logprobs": (None, 0, 20),
    "num_spec_tokens": (None, 0, 5),
    "presence_penalty": (-2, 0, 2.0),
    "frequency_penalty": (-2, 0, 2.0),
    "repetition_penalty": (1e-3, 1, 10.0),
    "logit_bias": ({}, {0: -100, 1: 100.0}, dict.fromkeys(range(1024), 1.0)),
    "bad_words": ((), "x", ["x"] * 100),
    "allowed_token_ids": (None, [0], range(3)),
    "structured_outputs": (None, StructuredOutputs(json_object=True)),
}
WRONG_FORMS = {
    "json": (
        5,
        [1],
        "",
        "{",
        "[1]",
        "null",
        '{"a": NaN}',
        '{"a": 1e999, "b"}',
        {"a": NAN},
        {"a": {1}},
    ),
    "regex": (5, "", ["a"], b"a", "a\ud800"),
    "choice": (5, "ab", [], [""], ["a", 5], {"a"}, ["\ud800"]),
    "grammar": (5, "", {"start": "a"}, "start: \ud800"),
    "json_object": (False, 1, "yes"),
}
BIG_FORMS = {
    "json": (
        "[" * 200_000,
        {"enum": ["x" * LIMITS.max_schema_bytes]},
        '"' + "é" * (130 << 10) + '"',
    ),
    "regex": ("x" * (LIMITS.max_regex_bytes + 1), "é" * (LIMITS.max_regex_bytes // 2 + 1)),
    "choice": (["x"] * 5001, ["x" * LIMITS.max_schema_bytes, "y"]),
    "grammar": ("x" * (LIMITS.max_grammar_bytes + 1),),
}
RIGHT_FORMS = {
    "json": ({}, {"type": "é"}, "{}", ' {"a": 1} ', True, False, "true", {"a": [{"b": None}]}),
    "regex": ("x", "x" * LIMITS.max_regex_bytes),
    "choice": (["a"], ("a", "b"), ["x"] * 5000),
    "grammar": ("start: A", "x" * LIMITS.max_grammar_bytes),
    "json_object": (True,),
}


def shown(value) -> str:
    """The part of a value that a message must repeat."""
    try:
        return repr(value)[:20]
    except ValueError:  # an integer too long for Python to write
        return "huge integer"


def cases(table):
    return [
        pytest.param(name, value, id=f"{name}-{i}")
        for name, values in table.items()
        for i, value in enumerate(values)
    ]


def test_every_field_has_wrong_values():
    assert WRONG.keys() == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("name", "value"), cases(WRONG))
def test_wrong_value_is_refused_by_name(name, value):
    with pytest.raises(ArgumentError) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert message.startswith(name)
    assert "\n" not in message
    assert len(message) < 200
    if isinstance(value, int | float | str):
        assert shown(value) in message or f"{len(value)} characters" in message
    elif value is None:
        assert "None" in message


@pytest.mark.parametrize(("name", "value"), cases(RIGHT))
def test_bounds_themselves_are_allowed(name, value):
    stored = getattr(SamplingParams(**{name: value}), name)
    if name in ("stop", "bad_words"):
        assert stored == ((value,) if isinstance(value, str) else tuple(value))
    elif isinstance(value, list | range):
        assert stored == tuple(value)
    else:
        assert stored == value


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"temperature": 3.5}, ["temperature=3.5", "0.0 (greedy) to 2.0"]),
        ({"min_tokens": 5, "max_tokens": 4}, ["min_tokens=5", "max_tokens=4"]),
        ({"stop": "x", "detokenize": False}, ["stop=('x',)", "detokenize=False", "stop_token_ids"]),
        ({"stop": ["x"] * 17}, ["17 strings", "16"]),
        ({"stop_token_ids": [3, -7]}, ["stop_token_ids=-7"]),
        ({"logit_bias": {7: 101}}, ["logit_bias[7]=101", "-100 to 100"]),
        ({"logit_bias": {"7": 1}}, ["logit_bias key='7'"]),
        ({"logit_bias": dict.fromkeys(range(1025), 0)}, ["1025 entries", "1024"]),
        ({"allowed_token_ids": []}, ["allowed_token_ids=()", "at least one"]),
        ({"bad_words": ["ok", "a\udc00"]}, ["bad_words", "'a\\udc00'", "surrogate"]),
        ({"top_k": -2}, ["top_k=-2", "-1 to 2147483647"]),
    ],
    ids=str,
)
def test_messages_say_what_would_be_right(fields, parts):
    with pytest.raises(ArgumentError) as caught:
        SamplingParams(**fields)
    text = f"{caught.value} {caught.value.hint}"
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize(("name", "value"), cases(WRONG_FORMS))
def test_wrong_form_is_refused_by_name(name, value):
    with pytest.raises(ArgumentError, match=f"^{name}") as caught:
        StructuredOutputs(**{name: value})
    assert caught.value.code == "invalid_argument"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("name", "value"), cases(BIG_FORMS))
def test_form_over_its_limit(name, value):
    with pytest.raises(ArgumentError, match=f"^{name}") as caught:
        StructuredOutputs(**{name: value})
    assert caught.value.code == "schema_too_complex"
    assert caught.value.hint


def test_form_nested_without_end():
    schema = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(ArgumentError, match="nested too deeply") as caught:
        StructuredOutputs(json=schema)
    assert caught.value.code == "schema_too_complex"
    while schema:  # recursion could not free an object of that depth
        schema = schema["items"]


@pytest.mark.parametrize(("name", "value"), cases(RIGHT_FORMS))
def test_right_forms(name, value):
    form = StructuredOutputs(**{name: value})
    stored = getattr(form, name)
    if name == "json":
        assert json.loads(stored) == (json.loads(value) if isinstance(value, str) else value)
    else:
        assert stored == (tuple(value) if name == "choice" else value)
    assert hash(form) == hash(StructuredOutputs(**{name: value}))
    params = SamplingParams(structured_outputs=form)
    assert pickle.loads(pickle.dumps(params)) == params
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params


def test_a_form_does_not_follow_its_schema_s_changes():
    schema = {"enum": [1]}
    form = StructuredOutputs(json=schema)
    schema["enum"].append(2)
    assert json.loads(form.json) == {"enum": [1]}
    assert list(json.loads(StructuredOutputs(json={"b": 1, "a": 2}).json)) == ["b", "a"]


@pytest.mark.parametrize(
    "fields", [{}, {"regex": "a", "grammar": "b"}, {"json": {}, "choice": ["a"]}]
)
def test_exactly_one_form(fields):
    with pytest.raises(ArgumentError, match=r"^structured_outputs has") as caught:
        StructuredOutputs(**fields)
    assert "exactly one" in caught.value.hint


def test_min_tokens_without_a_limit():
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6


def test_a_field_cannot_be_set():
    params = SamplingParams()
    for field in dataclasses.fields(params):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(params, field.name, getattr(params, field.name))


def test_the_callers_containers_are_copied():
    stop, ids, bias = ["a"], [1], {1: 2.0}
    params = SamplingParams(
        stop=stop, bad_words=stop, stop_token_ids=ids, allowed_token_ids=ids, logit_bias=bias
    )
    before = pickle.dumps(params)
    stop.append("b")
    ids.append(2)
    bias[3] = 1.0
    assert pickle.dumps(params) == before


def test_params_pickle_copy_and_replace():
    params = SamplingParams(
        n=3, temperature=0.5, stop=["a", "b"], logit_bias={5: -100}, seed=-1, logprobs=4
    )
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert dataclasses.replace(params, n=1).stop == ("a", "b")
    with pytest.raises(ArgumentError, match="n=99"):
        dataclasses.replace(params, n=99)


@pytest.mark.parametrize(
    ("temperature", "is_greedy"), [(0, True), (9.9e-6, True), (1e-5, False), (1.0, False)]
)
def test_greedy_is_a_temperature_of_nothing(temperature, is_greedy):
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


def test_has_penalties():
    assert not SamplingParams().has_penalties
    for name, value in (
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
    ):
        assert SamplingParams(**{name: value}).has_penalties


def test_limits_cannot_be_changed():
    for field in dataclasses.fields(LIMITS):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(LIMITS, field.name, 1)
    assert Limits() == LIMITS


CLASSES = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, TiercelError)
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_errors_pickle_with_their_attributes(kind):
    extra = {"param": "prompt"} if issubclass(kind, InvalidRequestError) else {}
    error = kind("what was wrong", hint="what is right", **extra)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == "what was wrong"
    assert again.hint == "what is right"
    assert vars(again) == vars(error)
    assert (again.http_status, again.code) == (kind.http_status, kind.code)


def test_error_tree():
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(ContextLengthError, InvalidRequestError)
    codes = {kind.__name__: (kind.http_status, kind.code) for kind in CLASSES}
    assert codes == {
        "TiercelError": (500, "internal_error"),
        "InvalidRequestError": (400, "invalid_request"),
        "ContextLengthError": (400, "context_length_exceeded"),
        "ArgumentError": (400, "invalid_argument"),
        "ModelNotFoundError": (404, "model_not_found"),
        "ModelFormatError": (400, "invalid_model"),
        "UnsupportedModelError": (400, "unsupported_model"),
        "OutOfMemoryError": (500, "out_of_memory"),
        "InternalError": (500, "internal_error"),
        "QueueFullError": (429, "queue_full"),
        "EngineDeadError": (503, "engine_restarting"),
        "EngineDiedTwiceError": (500, "engine_died_twice"),
        "RankLostError": (503, "engine_restarting"),
        "NoHostError": (503, "engine_restarting"),
        "InstallationError": (500, "broken_installation"),
        "BenchError": (500, "bench_failed"),
    }
    assert TiercelError("x").hint == ""
    assert InvalidRequestError("x").param is None
