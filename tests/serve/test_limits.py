"""The bounds of one request: a value at its bound passes, one beyond is refused and named.

The numbers of a bound are repeated here, so that one that moved by accident is noticed.
"""

import json

import pytest

from tests.serve.fake_client import FakeClient, ask
from tests.serve.http.test_body import Anything, post
from tiercel.errors import InvalidRequestError
from tiercel.params import LIMITS, Limits
from tiercel.request.request import TokenUpdate
from tiercel.serve.api.openai.chat import ChatRequest
from tiercel.serve.api.openai.completions import CompletionRequest
from tiercel.serve.generation.admission import check_counts
from tiercel.serve.generation.chat_messages import (
    FunctionSpec,
    Message,
    check_tools,
    template_messages,
)
from tiercel.serve.generation.output_events import ContentDelta
from tiercel.serve.generation.output_queue import CompletionDelta, OutputQueue
from tiercel.serve.http.body import decode, scan
from tiercel.serve.http.errors import escaped

pytestmark = pytest.mark.reliability


def test_the_bounds_are_those_of_the_documentation():
    assert Limits(
        max_n=16, max_stop_strings=16, max_stop_chars=1024, max_logit_bias=1024, max_logprobs=20,
        max_temperature=2.0, max_tokens=2147483647, max_prompt_bytes_per_token=64,
        max_score_items=4096, max_score_tokens=1000000, max_body_bytes=33554432, max_json_depth=64,
        max_json_members=200000, max_prompts=256, max_answers=1024, max_messages=2048,
        max_tools=128, max_tool_name_chars=128, max_schema_bytes=262144, max_schema_depth=32,
        max_schema_nodes=5000, max_regex_bytes=4096, max_grammar_bytes=65536,
        max_grammar_seconds=2.0, max_waiting_requests=512, max_queue_seconds=120.0,
        max_request_seconds=None, max_connections=2048, max_header_bytes=65536, max_headers=100,
        max_head_seconds=10.0, max_body_gap_seconds=30.0, max_body_seconds=300.0,
    ) == LIMITS  # fmt: skip


# --- Bodies ------------------------------------------------------------------------------------


def body_of(num_bytes):
    data = b'{"n": 3, "model": "%s"}'
    return data % (b"x" * (num_bytes - len(data) + 2))


def pieces_of(data, size):
    async def pieces():
        for start in range(0, len(data), size):
            yield data[start : start + size]

    return pieces()


@pytest.mark.parametrize("limit", [40, 1000])
@pytest.mark.parametrize("size", [None, 1, 7, 10**6])
def test_a_body_is_counted_to_the_byte(limit, size):
    """With its length in the head, and in pieces of any size without one."""
    for num_bytes in (limit - 1, limit, limit + 1):
        data = body_of(num_bytes)
        assert len(data) == num_bytes
        content = data if size is None else pieces_of(data, size)
        response, _ = post(content, limits=Limits(max_body_bytes=limit))
        if num_bytes <= limit:
            assert (response.status_code, response.json()) == (200, {"n": 3})
        else:
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
            assert f"limit is {limit}" in response.json()["error"]["message"]


@pytest.mark.parametrize("length", [b"101", b"1" * 30, b"0000101"])
def test_a_length_beyond_the_bound_is_refused_unread(length):
    async def never_read():
        raise AssertionError("the body was read")
        yield b""

    headers = {"content-type": "application/json", "content-length": length.decode()}
    response, _ = post(never_read(), headers=headers, limits=Limits(max_body_bytes=100))
    assert response.status_code == 413


def test_a_length_that_is_too_small_does_not_let_more_through():
    """A server in front may lie; what is read counts."""
    data = body_of(101)
    headers = {"content-type": "application/json", "content-length": "100"}
    content = pieces_of(data, 101)
    response, _ = post(content, headers=headers, limits=Limits(max_body_bytes=100))
    assert response.status_code == 413


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("limit", [1, 2, 5, 64])
def test_depth_is_counted_to_the_level(opening, limit):
    """The object itself is the first level."""
    closing = "]" if opening == "[" else "}"
    limits = Limits(max_json_depth=limit)
    for depth in (limit - 1, limit, limit + 1):
        inner = max(0, depth - 1)
        data = ('{"value": ' + opening * inner + "1" + closing * inner + "}").encode()
        if max(1, depth) <= limit:
            assert decode(data, Anything, limits)[1] == ()
        else:
            with pytest.raises(InvalidRequestError, match=f"deeper than {limit} ") as caught:
                decode(data, Anything, limits)
            assert caught.value.code == "invalid_json"


MEMBERS = {
    # text: members of all its objects and arrays; what is empty counts as one
    '{"value": [%s]}': lambda n: 1 + max(1, n),
    '{"value": [[%s]]}': lambda n: 2 + max(1, n),
    '{"value": {"b": [%s]}, "c": 1}': lambda n: 3 + max(1, n),
    '{"a": [], "b": {}, "value": [%s]}': lambda n: 5 + max(1, n),
}


@pytest.mark.parametrize("form", MEMBERS)
def test_members_are_counted_one_by_one(form):
    for num_items in (0, 1, 2, 5, 30):
        data = (form % ", ".join(["1"] * num_items)).encode()
        expected = MEMBERS[form](num_items)
        assert scan(data, LIMITS).num_members == expected
        scan(data, Limits(max_json_members=expected))
        with pytest.raises(InvalidRequestError, match=f"more than {expected - 1} members"):
            scan(data, Limits(max_json_members=expected - 1))


# --- Fields ------------------------------------------------------------------------------------

NUMBERS = {
    # field: the least and the largest value, a step beyond them
    "temperature": (0, 2.0, 1e-9), "top_p": (1e-9, 1.0, 1e-9), "top_k": (-1, 2147483647, 1),
    "min_p": (0, 1.0, 1e-9), "repetition_penalty": (1e-9, 10.0, 1e-9),
    "presence_penalty": (-2.0, 2.0, 1e-9), "frequency_penalty": (-2.0, 2.0, 1e-9),
    "min_tokens": (0, 2147483647, 1), "seed": (-(2**63), 2**63 - 1, 1), "n": (1, 16, 1),
    "prompt_logprobs": (0, 20, 1), "num_spec_tokens": (0, 2147483647, 1),
    "priority": (-(2**31), 2**31 - 1, 1),
}  # fmt: skip
MORE = {
    ChatRequest: {
        "max_tokens": (-1, 2147483647, 1), "max_completion_tokens": (-1, 2147483647, 1),
        "top_logprobs": (0, 20, 1),
    },
    CompletionRequest: {
        "max_tokens": (-1, 2147483647, 1), "logprobs": (0, 20, 1), "best_of": (1, 16, 1),
    },
}  # fmt: skip
BASES = {
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"model": "m", "prompt": "x"},
}


def refusal_of(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except InvalidRequestError as error:
        return error
    return None


def is_taken(kind, **fields):
    error = refusal_of(decode, json.dumps({**BASES[kind], **fields}).encode(), kind, LIMITS)
    if error is not None:
        assert (error.http_status, error.code) == (400, "invalid_request")
        assert error.param.partition("[")[0] in fields
    return error is None


@pytest.mark.parametrize("kind", BASES)
def test_numbers_end_where_they_say(kind):
    for name, (low, high, step) in {**NUMBERS, **MORE[kind]}.items():
        assert is_taken(kind, **{name: low}), name
        assert is_taken(kind, **{name: high}), name
        assert not is_taken(kind, **{name: low - step}), name
        assert not is_taken(kind, **{name: high + step}), name


@pytest.mark.parametrize("kind", BASES)
def test_lists_and_texts_end_where_they_say(kind):
    for fields, beyond in (
        ({"stop": "s" * 1024}, {"stop": "s" * 1025}),
        ({"stop": ["s" * 1024]}, {"stop": ["s" * 1025]}),
        ({"stop": ["s"] * 16}, {"stop": ["s"] * 17}),
        ({"stop": "s"}, {"stop": ""}),
        ({"bad_words": ["s" * 1024] * 1024}, {"bad_words": ["s"] * 1025}),
        ({"bad_words": ["s"]}, {"bad_words": [""]}),
        ({"logit_bias": {str(i): 100 for i in range(1024)}},
         {"logit_bias": {str(i): 1 for i in range(1025)}}),
        ({"logit_bias": {"0": -100}}, {"logit_bias": {"0": -100.001}}),
        ({"logit_bias": {"0": 100}}, {"logit_bias": {"0": 100.001}}),
        ({"logit_bias": {str(2**31 - 1): 1}}, {"logit_bias": {str(2**31): 1}}),
        ({"stop_token_ids": [0, 2**31 - 1]}, {"stop_token_ids": [2**31]}),
        ({"allowed_token_ids": [0]}, {"allowed_token_ids": [-1]}),
    ):  # fmt: skip
        assert is_taken(kind, **fields), list(fields)
        assert not is_taken(kind, **beyond), list(beyond)


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
RAW = {"model": "tiny", "prompt": "x"}
# Of a server: bound, its number, a body of so many, the field that a refusal names.
LOWERED = [
    ("max_n", 3, lambda n: ("/v1/chat/completions", {**CHAT, "n": n}), "n"),
    ("max_logprobs", 3,
     lambda n: ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": n}),
     "top_logprobs"),
    ("max_logprobs", 3,
     lambda n: ("/v1/chat/completions", {**CHAT, "prompt_logprobs": n}), "prompt_logprobs"),
    ("max_logprobs", 3, lambda n: ("/v1/completions", {**RAW, "logprobs": n}), "logprobs"),
    ("max_stop_strings", 2,
     lambda n: ("/v1/chat/completions", {**CHAT, "stop": ["s"] * n}), "stop"),
    ("max_stop_chars", 5, lambda n: ("/v1/completions", {**RAW, "stop": "s" * n}), "stop"),
    ("max_stop_chars", 5, lambda n: ("/v1/completions", {**RAW, "stop": ["s" * n]}), "stop"),
    ("max_logit_bias", 2,
     lambda n: ("/v1/completions", {**RAW, "logit_bias": {str(97 + i): 1 for i in range(n)}}),
     "logit_bias"),
    ("max_prompts", 3, lambda n: ("/v1/completions", {**RAW, "prompt": ["x"] * n}), "prompt"),
    ("max_answers", 6,
     lambda n: ("/v1/completions", {**RAW, "prompt": ["x", "y"], "n": (n + 1) // 2}), "n"),
    ("max_messages", 3,
     lambda n: ("/v1/chat/completions", {**CHAT, "messages": CHAT["messages"] * n}), "messages"),
    ("max_schema_bytes", 4,
     lambda n: ("/v1/completions", {**RAW, "guided_choice": ["ab", "c" * (n - 2)]}),
     "guided_choice"),
    ("max_schema_nodes", 2,
     lambda n: ("/v1/completions", {**RAW, "guided_choice": ["a", "b", "c"][:n]}),
     "guided_choice"),
    ("max_regex_bytes", 3,
     lambda n: ("/v1/completions", {**RAW, "guided_regex": "a" * n}), "guided_regex"),
    ("max_grammar_bytes", 14,
     lambda n: ("/v1/completions", {**RAW, "guided_grammar": 'start: "a"'.ljust(n, "\n")}),
     "guided_grammar"),
]  # fmt: skip


def quick_client():
    client = FakeClient()
    client.script = lambda request: [TokenUpdate((97,), (), "length", None)]
    return client


@pytest.mark.parametrize(
    ("bound", "number", "make", "param"), LOWERED, ids=lambda value: str(value)[:20]
)
def test_a_server_takes_what_its_bound_allows_and_no_more(bound, number, make, param):
    calls = []
    for count in (number, number + 1):
        path, body = make(count)
        calls.append(("POST", path, {"json": {**body, "max_tokens": 1}}))
    inside, beyond = ask(*calls, client=quick_client(), limits=Limits(**{bound: number}))
    assert inside.status_code == 200, inside.text
    assert beyond.status_code == 400
    assert beyond.json()["error"]["param"] == param


def refused_param(function, *arguments, **options):
    return getattr(refusal_of(function, *arguments, **options), "param", None)


def test_answers_of_one_request_are_prompts_times_n():
    limits = Limits(max_prompts=7, max_n=5, max_answers=12)
    for num_prompts in range(10):
        for n in range(1, 8):
            expected = None
            if not 1 <= num_prompts <= 7:
                expected = "input"
            elif n > 5 or num_prompts * n > 12:
                expected = "n"
            assert refused_param(check_counts, num_prompts, n, limits, "input") == expected


def test_tools_and_their_names():
    limits = Limits(max_tools=3, max_tool_name_chars=4)
    tools = [FunctionSpec(name=name) for name in ("a", "b", "c", "d")]
    assert refused_param(check_tools, tools[:3], limits) is None
    assert refused_param(check_tools, tools, limits) == "tools"
    assert refused_param(check_tools, [FunctionSpec(name="abcd")], limits) is None
    assert refused_param(check_tools, [tools[0], FunctionSpec(name="abcde")], limits) == "tools[1]"
    assert refused_param(check_tools, [*tools[:2], tools[0]], limits) == "tools[2]"
    for name, is_sound in (("f" * 128, True), ("f" * 129, False), ("", False), ("a.b", False),
                           ("a-B_9", True), ("a b", False)):  # fmt: skip
        given = {"type": "function", "function": {"name": name}}
        assert is_taken(ChatRequest, tools=[given]) == is_sound, name


def test_messages_of_one_request():
    limits = Limits(max_messages=3)
    message = Message(role="user", content="x")
    for count in range(6):
        found = refused_param(template_messages, [message] * count, limits, knows_developer=True)
        assert found == (None if 1 <= count <= 3 else "messages")


# --- What waits for a reader, and what messages repeat ------------------------------------------


@pytest.mark.parametrize("text", ["x", "x" * 2000])
def test_pieces_wait_up_to_their_bounds(text):
    """1,024 pieces or a Mi of characters; after that a new one joins the last of its answer."""
    line = OutputQueue(is_stream=True)
    count = 1100
    for place in range(count):
        line.put(CompletionDelta(0, events=[ContentDelta(text)], num_tokens=place + 1))
    line.put(CompletionDelta(1, events=[ContentDelta("other")], num_tokens=1))
    pieces = line.take()
    most = 1024 if len(text) == 1 else -(-(1 << 20) // len(text))
    assert len(pieces) == most + 1
    assert [piece.index for piece in pieces] == [0] * most + [1]
    assert sum(len(piece.events) for piece in pieces[:-1]) == count
    assert pieces[-2].num_tokens == count
    assert line.take() == []
    line.put(CompletionDelta(0, events=[ContentDelta("y")]))  # counted anew after a read
    line.put(CompletionDelta(0, events=[ContentDelta("z")]))
    assert len(line.take()) == 2


def test_a_plain_answer_is_one_piece():
    line = OutputQueue(is_stream=False)
    for place in range(5):
        line.put(CompletionDelta(place % 2, events=[ContentDelta(str(place))], token_ids=[place]))
    pieces = line.take()
    assert [(piece.index, piece.token_ids) for piece in pieces] == [(0, [0, 2, 4]), (1, [1, 3])]


def test_text_in_messages_is_one_line_of_a_bounded_length():
    for length in range(1, 40):
        for text in ("x" * length, "\n" * length, "é\u2028" * length):
            clean = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
            found = escaped(text, 20)
            if len(text) <= 20 and len(clean) <= 20:
                assert found == clean
            else:
                assert found == f"{clean[:17]}..."
            assert found.isprintable()
