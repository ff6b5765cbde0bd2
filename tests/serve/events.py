"""Server-sent events as a client reads them, and answers put together from the pieces."""

import json
from dataclasses import dataclass, field

from tests.serve.fake_client import fake_tokenizer
from tiercel.request.request import TokenLogprobs, TokenUpdate


def read_events(data):
    """(name, value) of each event; strict: one `data` line, an empty line, nothing else.

    The value is decoded JSON, or the text ``[DONE]``.
    """
    text = data.decode() if isinstance(data, bytes) else data
    assert text.endswith("\n\n"), "cut inside an event"
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        if lines == [": keep-alive"]:
            continue
        name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else ""
        assert len(lines) == 1, block
        assert lines[0].startswith("data: "), block
        value = lines[0].removeprefix("data: ")
        events.append((name, value if value == "[DONE]" else json.loads(value)))
    return events


@dataclass
class Joined:
    """One choice of a stream, its pieces joined."""

    content: str = ""
    reasoning: str = ""
    calls: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    token_ids: list = field(default_factory=list)
    finish_reasons: list = field(default_factory=list)
    stop_reason: object = None
    num_chunks: int = 0


def read_chat(data):
    """Choices by index, the usage of the last chunk, and all chunks of a chat stream."""
    events = read_events(data)
    assert events[-1] == ("", "[DONE]")
    chunks = [value for _, value in events[:-1]]
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    choices = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            joined = choices.setdefault(choice["index"], Joined())
            if joined.num_chunks == 0:
                assert choice["delta"] == {"role": "assistant", "content": ""}
            joined.num_chunks += 1
            _add_chat_delta(joined, choice)
    usage = chunks[-1].get("usage") if not chunks[-1]["choices"] else None
    return choices, usage, chunks


def _add_chat_delta(joined, choice):
    delta = choice["delta"]
    joined.content += delta.get("content") or ""
    joined.reasoning += delta.get("reasoning_content") or ""
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            assert call["index"] == len(joined.calls)
            assert call["function"]["arguments"] == ""
            joined.calls.append([call["id"], call["function"]["name"], ""])
        else:
            assert set(call) == {"index", "function"}
            joined.calls[call["index"]][2] += call["function"]["arguments"]
    joined.logprobs += (choice["logprobs"] or {}).get("content", [])
    joined.token_ids += choice.get("token_ids", [])
    if choice["finish_reason"] is not None:
        joined.finish_reasons.append(choice["finish_reason"])
        joined.stop_reason = choice["stop_reason"]


def updates(text, *, reason="stop", group=1, end_id=None):
    """Updates of an answer that is these words and then, for ``stop``, an end token.

    `group` tokens come in one step; log-probabilities are made up, the same for the same token.
    """
    tokenizer = fake_tokenizer()
    ids = tokenizer.encode(text) if isinstance(text, str) else list(text)
    if reason == "stop":
        ids = [*ids, tokenizer.eos_id if end_id is None else end_id]
    steps = [ids[i : i + group] for i in range(0, len(ids), group)]
    return [
        TokenUpdate(
            tuple(step),
            tuple(made_up(token_id) for token_id in step),
            reason if place == len(steps) - 1 else None,
            step[-1] if place == len(steps) - 1 and reason == "stop" else None,
        )
        for place, step in enumerate(steps)
    ]


def made_up(token_id):
    """Log-probabilities of a token that is the second best."""
    return TokenLogprobs(token_id, -1.5, ((97, -0.5), (token_id, -1.5), (98, -2.5)))


def with_logprobs(request, steps):
    """The updates as the engine sends them: without log-probabilities nobody asked for."""
    if request.params.logprobs is not None:
        return steps
    return [
        TokenUpdate(step.new_token_ids, (), step.finish_reason, step.stop_reason)
        if isinstance(step, TokenUpdate)
        else step
        for step in steps
    ]


def says(text, **options):
    """A script for `FakeClient`: every request gets this answer."""
    return lambda request: with_logprobs(request, updates(text, **options))
