"""JSON bodies: what is refused, with which code, at which place, and for how little work."""

import asyncio
import json
from typing import Annotated, Literal

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta
from starlette.applications import Starlette
from starlette.responses import JSONResponse

from tests.serve.fake_client import fake_state
from tiercel.errors import InvalidRequestError
from tiercel.params import LIMITS, Limits
from tiercel.serve.api.request_body import read_body
from tiercel.serve.http import body as body_module
from tiercel.serve.http.body import MAX_LOOP_BYTES, Int64, decode, scan
from tiercel.serve.http.errors import error_response
from tiercel.serve.http.metrics import EngineGauges

pytestmark = pytest.mark.reliability


class Inner(msgspec.Struct):
    """Nested."""

    role: str
    size: Annotated[int, Meta(ge=0, le=5)] = 0


class Left(msgspec.Struct, tag_field="side", tag="left"):
    """One of two kinds."""


class Right(msgspec.Struct, tag_field="side", tag="right"):
    """The other."""


class Body(msgspec.Struct):
    """Of each kind of field one."""

    model: str = ""
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    seed: Int64 | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    messages: list[Inner] = []
    bias: dict[int, float] = {}
    choice: Literal["auto", "none"] | Inner | None = None
    turns: list[Left | Right] = []


def refused(data, limits=LIMITS):
    with pytest.raises(InvalidRequestError) as caught:
        decode(data, Body, limits)
    return caught.value


class Tokens:
    """The expression that finds tokens; counts those that are read, and their bytes."""

    def __init__(self, pattern):
        self.pattern = pattern
        self.count = self.num_bytes = 0

    def finditer(self, data):
        for match in self.pattern.finditer(data):
            self.count += 1
            self.num_bytes += len(match[0])
            yield match


@pytest.fixture
def tokens(monkeypatch):
    counted = Tokens(body_module._TOKEN)
    monkeypatch.setattr(body_module, "_TOKEN", counted)
    return counted


MALFORMED = {
    "empty": (b"", "it is empty (byte 0)"),
    "blank": (b" \n", "it is empty (byte 2)"),
    "null": (b"null", "it is no object (byte 0)"),
    "array": (b"  [1]", "it is no object (byte 2)"),
    "string": (b'"x"', "it is no object (byte 0)"),
    "number": (b"1", "it is no object (byte 0)"),
    "cut": (b'{"model": "a', "(byte 12)"),
    "cut in a list": (b'{"messages": [', "(byte 14)"),
    "trailing": (b'{"n": 1} x', "trailing characters (byte 10)"),
    "two objects": (b"{}{}", "trailing characters (byte 3)"),
    "trailing comma": (b'{"n": 1,}', "(byte 8)"),
    "single quotes": (b"{'n': 1}", "(byte 1)"),
    "comment": (b'{"n": 1 /* no */}', "(byte 8)"),
    "not UTF-8": (b'{"model": "\xff"}', "no UTF-8 (byte 11)"),
    "encoded surrogate": (b'{"model": "\xed\xa0\x80"}', "no UTF-8 (byte 11)"),
    "UTF-16": ('{"n": 1}'.encode("utf-16"), "no UTF-8 (byte 0)"),
    "UTF-16 without mark": ('{"n": 1}'.encode("utf-16-le"), "(byte 1)"),
    "byte order mark": (b"\xef\xbb\xbf{}", "(byte 0)"),
    "NUL": (b'{"n": 1}\0', "trailing characters (byte 9)"),
    "raw control": (b'{"model": "a\x01"}', "(byte 12)"),
    "NaN": (b'{"temperature": NaN}', "(byte 16)"),
    "Infinity": (b'{"temperature": Infinity}', "(byte 16)"),
    "-Infinity": (b'{"temperature": -Infinity}', "(byte 17)"),
    "NaN in an unknown field": (b'{"other": [NaN]}', "(byte 11)"),
    "1e400 in an unknown field": (b'{"other": [1e400]}', "too large"),
    "digits in an unknown field": (b'{"other": ' + b"9" * 100_000 + b"}", "too large"),
    "leading zero": (b'{"n": 01}', "(byte 7)"),
    "lone surrogate": (rb'{"model": "\ud800"}', "surrogate pair is not complete (byte 11)"),
    "lone low surrogate": (rb'{"model": "x\udc00"}', "surrogate"),
    "surrogate in a key": (rb'{"\ud800": 1}', "surrogate pair is not complete (byte 2)"),
    "bad escape": (rb'{"model": "\q"}', "(byte 13)"),
    "key twice": (b'{"n": 1, "n": 2}', "the key 'n' occurs twice in one object (byte 12)"),
    "key twice, spelt otherwise": (rb'{"n": 1, "\u006e": 2}', "the key 'n' occurs twice"),
    "unknown key twice": (b'{"a": {"b": 1, "b": 1}}', "the key 'b' occurs twice"),
    "brackets": (b'{"messages": [}]}', "(byte 14)"),
    "only closing": (b"{}}", "trailing characters (byte 3)"),
    "a wrong field, and trailing": (b'{"n": "x"} {}', "trailing characters (byte 12)"),
    "a wrong field, and cut": (b'{"n": "x", "messages": [', "ends too early (byte 24)"),
    "a wrong field, and NaN": (b'{"n": "x", "other": NaN}', "(byte 20)"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_json_names_the_place(name):
    data, words = MALFORMED[name]
    error = refused(data)
    assert error.code == "invalid_json"
    assert error.http_status == 400
    assert words in str(error)


WRONG_VALUES = [-1, 0, 2**31, 2**63, 2**64, 10**30, 1.5, "1", True, None, [], {}]


@pytest.mark.parametrize("value", WRONG_VALUES, ids=repr)
def test_a_wrong_number_is_named(value):
    error = refused(json.dumps({"n": value}).encode())
    assert error.code == "invalid_request"
    assert error.param == "n"
    assert "n: " in str(error)


@pytest.mark.parametrize("text", ["1e400", "1e99999999999", "9" * 100_000, "-" + "9" * 100_000])
@pytest.mark.parametrize("field", ["n", "seed", "temperature"])
def test_numbers_without_end_are_named_in_few_words(field, text):
    """Nothing converts them: Python refuses an integer of so many digits with a ValueError."""
    error = refused(b'{"%s": %s}' % (field.encode(), text.encode()))
    assert error.param == field
    assert len(str(error)) < 500


@pytest.mark.parametrize(
    ("data", "param", "words"),
    [
        (b'{"messages": [{"role": "a"}, {"role": 1}]}', "messages[1].role", "but it is 1."),
        (b'{"messages": [{}]}', "messages[0].role", "this field must be given."),
        (b'{"messages": [{"role": "a", "size": 9}]}', "messages[0].size", "<= 5, but it is 9."),
        (b'{"bias": {"a": 1}}', "bias", "expected int"),
        (b'{"bias": {"1": "x"}}', "bias[...]", "expected float"),
        (b'{"temperature": 3.5}', "temperature", "<= 2.0, but it is 3.5."),
        (b'{"n": "\\u0007 %s"}' % (b"x" * 1000), "n", "\\u0007"),
        (b'{"choice": "a"}', "choice", 'expected auto | none, but it is "a".'),
        (b'{"turns": [{"side": "a"}]}', "turns[0].side", 'expected left | right, but it is "a".'),
    ],
)
def test_a_wrong_field_is_named_with_value_and_rule(data, param, words):
    error = refused(data)
    assert error.param == param
    assert words in str(error)
    assert len(str(error)) < 300
    assert str(error).isprintable()


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
def test_depth_is_bounded_and_nothing_deeper_read(opening, tokens):
    error = refused(b'{"other": ' + opening * 100_000)
    assert tokens.count < 4 * LIMITS.max_json_depth
    assert error.code == "invalid_json"
    assert "nested deeper than 64" in str(error)


def test_depth_counts_what_is_open():
    limits = Limits(max_json_depth=3)
    scan(b'{"a": [[1], [1], {"b": 1}]}', limits)
    with pytest.raises(InvalidRequestError, match="deeper than 3"):
        scan(b'{"a": [[[1]]]}', limits)


def test_brackets_in_strings_do_not_count():
    value, _ = decode(json.dumps({"model": "[{" * 500 + '\\"' * 50}).encode(), Body, LIMITS)
    assert value.model == "[{" * 500 + '\\"' * 50


@pytest.mark.parametrize("item", [b"1,", b'"",', b"[],", b"{},", b'{"a":1},'])
def test_members_are_bounded(item):
    data = b'{"other": [' + item * 200_001 + b"1]}"
    assert "more than 200000 members" in str(refused(data))


def test_many_members_pass():
    value, _ = decode(b'{"other": [' + b"1," * 190_000 + b"1]}", Body, LIMITS)
    assert value.n == 1


@pytest.mark.parametrize(
    ("tail", "is_one"), [(b'\\"' * 20_000, True), (b'"' * 20_000, False), (b"\\" * 20_001, True)]
)
def test_strings_without_end_are_scanned_once(tail, is_one, tokens):
    """As one token, not from each quote anew; strings side by side are not looked at."""
    refused(b'{"model": "' + tail)
    assert tokens.count < 30
    assert (tokens.num_bytes >= len(tail)) is is_one


@pytest.mark.parametrize("junk", [b":", b'"a"', b"]", b'"a":', b"}:"])
def test_what_is_no_json_is_not_read_to_its_end(junk, tokens):
    error = refused(b"{" + junk * 100_000)
    assert tokens.count < 30
    assert error.code == "invalid_json"


def test_unknown_fields_are_named():
    value, unknown = decode(b'{"n": 2, "zeta": 1, "alpha": {"n": 1}}', Body, LIMITS)
    assert value.n == 2
    assert unknown == ("alpha", "zeta")


def test_valid_pair_of_surrogates():
    value, _ = decode(rb'{"model": "\ud83d\ude00"}', Body, LIMITS)
    assert value.model == "\N{GRINNING FACE}"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


class Anything(msgspec.Struct):
    """One field that takes all."""

    value: object = None


@settings(max_examples=200, deadline=None)
@given(JSON_VALUES, st.booleans())
def test_what_python_writes_is_read(value, is_ascii):
    data = json.dumps({"value": value, "last": 1}, ensure_ascii=is_ascii).encode()
    found, unknown = decode(data, Anything, LIMITS)
    assert unknown == ("last",)  # so it was scanned to its end
    assert found.value == value


def outcome(data):
    """The error, or None."""
    try:
        decode(data, Body, LIMITS)
    except InvalidRequestError as error:
        return error
    return None


def assert_value_or_400(data):
    error = outcome(data)
    assert error is None or (error.http_status == 400 and str(error).isprintable())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\u0dDefn1. ', max_size=60))
def test_any_bytes_end_in_a_value_or_a_400(data):
    assert_value_or_400(data if isinstance(data, bytes) else data.encode())


@settings(max_examples=300, deadline=None)
@given(JSON_VALUES, st.integers(0, 200), st.binary(min_size=1, max_size=3))
def test_damaged_json_ends_in_a_value_or_a_400(value, place, damage):
    data = json.dumps({"model": "m", "value": value}).encode()
    cut = data[: place % len(data)] + damage + data[place % len(data) + 1 :]
    assert_value_or_400(cut)


def post(content, *, headers=None, limits=LIMITS, **settings):
    """Send a body to an application whose one route reads it; pieces are sent as they are read."""
    app = Starlette()
    app.state.server = fake_state(**settings)

    async def echo(request):
        try:
            body = await read_body(request, Body, limits)
        except InvalidRequestError as error:
            return error_response(error, "r")
        return JSONResponse({"n": body.n})

    async def send():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await http.post("/", content=content, headers=headers)

    app.add_route("/", echo, methods=["POST"])
    headers = {"content-type": "application/json"} if headers is None else headers
    return asyncio.run(send()), app.state.server.metrics


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": ""},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/jsonp"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
    ids=str,
)
def test_other_types_are_415(headers):
    response, _ = post(b"{}", headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON", 'application/json; charset="UTF-8"']
)
def test_json_types_are_taken(kind):
    assert post(b'{"n": 3}', headers={"content-type": kind})[0].json() == {"n": 3}


def test_a_large_body_is_413_by_its_length_and_while_reading():
    limits = Limits(max_body_bytes=100)
    response, _ = post(b"x" * 101, limits=limits)
    assert response.status_code == 413
    assert response.headers["connection"] == "close"

    async def pieces():
        yield b"x" * 99
        yield b"x" * 2
        raise AssertionError("read on after the limit")

    response, _ = post(pieces(), limits=limits)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_a_body_over_256_kib_is_decoded_off_the_loop():
    text = "x" * (MAX_LOOP_BYTES + 1)
    response, _ = post(json.dumps({"n": 5, "model": text}).encode())
    assert response.json() == {"n": 5}
    assert post(json.dumps({"n": 99, "model": text}).encode())[0].status_code == 400


def test_unknown_fields_are_counted_or_refused():
    response, metrics = post(b'{"zeta": 1, "n": 2}')
    assert response.json() == {"n": 2}
    text = metrics.render([EngineGauges()], num_template_kills=0)
    assert b'tiercel:unknown_fields_total{engine="0",model_name=""} 1.0' in text
    response, _ = post(b'{"zeta": 1, "n": 2}', is_strict=True)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "zeta"
