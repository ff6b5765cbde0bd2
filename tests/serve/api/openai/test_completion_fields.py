"""What answers say of their tokens: usage, log-probabilities, events made one, errors by status."""

import itertools
import math
import random

import msgspec
import pytest

from tests.serve.fake_client import fake_tokenizer
from tiercel.errors import InternalError, QueueFullError, TiercelError
from tiercel.request.request import TokenLogprobs
from tiercel.serve.api.anthropic.messages_output import stop_reason, usage_of
from tiercel.serve.api.assembled_message import assemble_message, merge_events
from tiercel.serve.api.openai.completion_fields import StreamUsage, finish_reason_of, usage_object
from tiercel.serve.api.openai.logprobs import chat_logprobs, completion_top, prompt_logprobs
from tiercel.serve.api.sampling_fields import StreamOptions
from tiercel.serve.generation.output_events import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from tiercel.serve.generation.output_queue import CompletionDelta
from tiercel.serve.generation.usage import Usage
from tiercel.serve.http.errors import (
    anthropic_error_response,
    client_error,
    error_response,
    overload_error,
    unsupported_parameter,
)

TOKENIZER = fake_tokenizer()


def fields_of(value):
    return msgspec.json.decode(msgspec.json.encode(value))


# --- Usage -------------------------------------------------------------------------------------


class Counted:
    """As much of a generation as usage is read from."""

    def __init__(self, usage):
        self._usage = usage

    def usage(self):
        return self._usage


def test_usage_in_the_words_of_each_api():
    usage = Usage(prompt=1000, completion=200, cached=30, reasoning=4)
    assert fields_of(usage_object(usage)) == {
        "prompt_tokens": 1000,
        "completion_tokens": 200,
        "total_tokens": 1200,
        "prompt_tokens_details": {"cached_tokens": 30},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }
    found = fields_of(usage_of(usage))
    assert found["input_tokens"] == 970
    assert found["output_tokens"] == 200
    assert found["cache_read_input_tokens"] == 30
    assert sum(found[name] for name in ("input_tokens", "cache_read_input_tokens")) == 1000


@pytest.mark.parametrize("include", [None, False, True])
@pytest.mark.parametrize("is_continuous", [None, False, True])
def test_usage_of_a_stream_counts_what_was_sent(include, is_continuous):
    options = StreamOptions(include_usage=include, continuous_usage_stats=is_continuous)
    rng = random.Random(0)
    meter = StreamUsage(options)
    generation = Counted(Usage(prompt=7, completion=99, cached=2, reasoning=1))
    sent = {}
    for _ in range(12):
        index = rng.randrange(3)
        sent[index] = sent.get(index, 0) + rng.randint(1, 4)
        meter.count(CompletionDelta(index, num_tokens=sent[index]))
        found = meter.so_far(generation)
        if is_continuous:
            assert found.completion_tokens == sum(sent.values())
            assert found.total_tokens == 7 + sum(sent.values())
        else:
            assert found is (None if include else msgspec.UNSET)
    total = meter.total(generation)
    assert (total is None) == (not include)
    assert total is None or total.completion_tokens == 99
    without = StreamUsage(None)
    assert (without.so_far(generation), without.total(generation)) == (msgspec.UNSET, None)


# --- Events ------------------------------------------------------------------------------------


def random_events(rng):
    """Events of an answer: runs of reasoning, content and calls, each in small pieces."""
    events, num_calls, whole = [], 0, {"content": "", "reasoning": "", "calls": []}
    for _ in range(rng.randint(0, 8)):
        kind = rng.choice(["content", "reasoning", "call"])
        pieces = [rng.choice(["a", "é", "\n", "xyz"]) for _ in range(rng.randint(1, 4))]
        if kind == "call":
            events.append(ToolCallStart(num_calls, f"call_{num_calls}", f"f{num_calls}"))
            pieces = pieces[: rng.randint(0, 4)]
            events += [ToolCallArguments(num_calls, text) for text in pieces]
            whole["calls"].append((f"call_{num_calls}", f"f{num_calls}", "".join(pieces)))
            num_calls += 1
        else:
            make = ContentDelta if kind == "content" else ReasoningDelta
            events += [make(text) for text in pieces]
            whole[kind] += "".join(pieces)
    return events, whole


@pytest.mark.parametrize("seed", range(40))
def test_events_made_one_say_the_same(seed):
    events, whole = random_events(random.Random(seed))
    runs = merge_events(events)
    for found in (assemble_message(events), assemble_message(runs)):
        assert (found.content, found.reasoning) == (whole["content"], whole["reasoning"])
        assert [(c.id, c.name, c.arguments) for c in found.calls] == whole["calls"]
    for before, after in itertools.pairwise(runs):
        is_split = type(before) is type(after) and not isinstance(after, ToolCallStart)
        assert not is_split or before.index != after.index
    chars = sum(event.num_chars for event in events)
    assert sum(event.num_chars for event in runs) == chars


def test_pieces_of_two_calls_stay_apart():
    """Also where the start of the second came before."""
    events = [ToolCallArguments(0, "{"), ToolCallArguments(0, "}"), ToolCallArguments(1, "{}")]
    assert merge_events(events) == [ToolCallArguments(0, "{}"), ToolCallArguments(1, "{}")]


def test_why_an_answer_ended_in_the_words_of_each_api():
    words = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    for reason, theirs in words.items():
        assert finish_reason_of(CompletionDelta(0, finish_reason=reason)) == reason
        assert stop_reason(CompletionDelta(0, finish_reason=reason)) == theirs
    assert (
        stop_reason(CompletionDelta(0, finish_reason="stop", stop_reason="\n")) == "stop_sequence"
    )
    assert stop_reason(CompletionDelta(0, finish_reason="stop", stop_reason=5)) == "end_turn"


# --- Log-probabilities -------------------------------------------------------------------------


def name_of(token_id):
    """From the vocabulary, without the functions under test."""
    if token_id >= TOKENIZER.vocab_size:
        return ""
    if token_id in TOKENIZER.control_tokens.values() or token_id in TOKENIZER.unused_ids:
        return TOKENIZER.token_text(token_id)
    return TOKENIZER.decode([token_id], is_continuation=True)


def bytes_of(token_id):
    if token_id in TOKENIZER.control_tokens.values() or token_id in TOKENIZER.unused_ids:
        return None
    return None if token_id >= TOKENIZER.vocab_size else list(TOKENIZER.token_bytes(token_id))


def random_entries(rng, count):
    entries = []
    for _ in range(count):
        ids = rng.sample(range(TOKENIZER.vocab_size + 5), 6)
        values = sorted((rng.uniform(-12, 0) for _ in ids), reverse=True)
        values[-1] = -math.inf
        top = tuple(zip(ids, values, strict=True))
        place = rng.randrange(8)
        token_id, logprob = top[place] if place < 6 else (TOKENIZER.eos_id, -20.0)
        entries.append(TokenLogprobs(token_id, logprob, top))
    return entries


def shown(value):
    return -9999.0 if value == -math.inf else value


@pytest.mark.parametrize("num_top", [0, 1, 4, 6])
def test_log_probabilities_of_a_chat(num_top):
    entries = random_entries(random.Random(num_top), 40)
    found = fields_of(chat_logprobs(TOKENIZER, entries, num_top))
    for entry, shape in zip(entries, found, strict=True):
        assert shape["token"] == name_of(entry.token_id)
        assert shape["logprob"] == shown(entry.logprob)
        assert shape["bytes"] == bytes_of(entry.token_id)
        assert shape["top_logprobs"] == [
            {"token": name_of(i), "logprob": shown(value), "bytes": bytes_of(i)}
            for i, value in entry.top[:num_top]
        ]


@pytest.mark.parametrize("num_top", [0, 1, 4, 6])
def test_log_probabilities_of_a_prompt(num_top):
    """As vLLM shows them: null first, then by id, with ranks from 1; the token itself last."""
    entries = random_entries(random.Random(num_top), 40)
    first, *found = fields_of(prompt_logprobs(TOKENIZER, entries, num_top))
    assert first is None
    for entry, shape in zip(entries, found, strict=True):
        ranks = {i: rank for rank, (i, _) in enumerate(entry.top, 1)}
        wanted = {**dict(entry.top[:num_top]), entry.token_id: entry.logprob}
        assert list(shape) == [str(i) for i in wanted]
        for i, value in wanted.items():
            assert shape[str(i)] == {
                "logprob": shown(value),
                "rank": ranks.get(i),
                "decoded_token": name_of(i),
            }


@pytest.mark.parametrize("num_top", [0, 1, 4, 6])
def test_log_probabilities_of_raw_completions(num_top):
    """By text; of tokens with one text the most likely counts; the token itself is always there."""
    for entry in random_entries(random.Random(num_top), 80):
        wanted = {}
        for i, value in (*entry.top[:num_top], (entry.token_id, entry.logprob)):
            wanted[name_of(i)] = max(shown(value), wanted.get(name_of(i), -9999.0))
        assert completion_top(TOKENIZER, entry, num_top) == wanted


# --- Errors ------------------------------------------------------------------------------------

TYPES = {  # status: OpenAI's type, Anthropic's type
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    499: ("invalid_request_error", "invalid_request_error"),
    500: ("server_error", "api_error"),
    501: ("server_error", "api_error"),
    503: ("overloaded_error", "overloaded_error"),
}


@pytest.mark.parametrize("status", TYPES)
def test_errors_by_status(status):
    error = client_error(status, "some_code", "Wrong.", hint="Right.", param="field")
    plain, theirs = error_response(error, "req_1"), anthropic_error_response(error, "req_1")
    message = "Wrong. Right." if status != 500 else None
    first = msgspec.json.decode(plain.body)["error"]
    found = (first["type"], first["code"], first["param"])
    assert found == (TYPES[status][0], "some_code", "field")
    second = msgspec.json.decode(theirs.body)
    assert second["type"] == "error"
    assert second["request_id"] == "req_1"
    assert second["error"]["type"] == TYPES[status][1]
    for response, text in ((plain, first["message"]), (theirs, second["error"]["message"])):
        assert response.status_code == status
        assert text == message or (status == 500 and "req_1" in text and "Wrong" not in text)
        assert response.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
        assert response.headers.get("connection") == ("close" if status == 413 else None)
        assert "retry-after" not in response.headers


@pytest.mark.parametrize(
    ("seconds", "told"), [(-5, 1), (0, 1), (1, 1), (2, 2), (59, 59), (60, 60), (61, 60), (999, 60)]
)
def test_when_to_come_back_is_within_a_minute(seconds, told):
    error = overload_error("draining", "Later.", seconds)
    assert (error.http_status, error.code) == (503, "draining")
    assert error_response(error, "r").headers["retry-after"] == str(told)
    full = QueueFullError("Later.")
    full.retry_after_s = seconds
    assert error_response(full, "r").status_code == 429
    assert error_response(full, "r").headers["retry-after"] == str(told)


def test_errors_without_a_field_name_none():
    for error in (InternalError("x"), TiercelError("x")):
        assert msgspec.json.decode(error_response(error, "r").body)["error"]["param"] is None
    field = unsupported_parameter("stop")
    assert (field.http_status, field.code, field.param) == (400, "unsupported_parameter", "stop")
