"""Client of an OpenAI-compatible server that records the arrival of each piece of an answer.

Token counts are the server's own (`usage`): a piece may contain several tokens, or a part of one.
An answer without usage, with an error event, or cut before its end is an error of its own kind,
never a shorter answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import msgspec

from tiercel.bench.http_client import Exchange, ExchangeError, HttpClient

MAX_LINE_BYTES = 16 << 20
_MAX_DETAIL = 200  # most characters of an error


class Sample(msgspec.Struct, omit_defaults=True):
    """One request and its outcome. Times are in seconds.

    Attributes:
        index: number of the request in its level.
        start_s: time at which it was sent, since the level began.
        output_len: number of requested tokens.
        due_s: time at which it should have been sent; open loop only.
        first_s: time from sending to the first piece with text.
        latency_s: time from sending to the last piece.
        piece_s: times from sending to each piece with text.
        prompt_tokens, completion_tokens, cached_tokens: counts of the server.
        finish_reason: finish reason from the server.
        error: kind of the error; None without an error.
        detail: message of the server or the system for it.
    """

    index: int
    start_s: float
    output_len: int
    due_s: float | None = None
    first_s: float | None = None
    latency_s: float | None = None
    piece_s: list[float] = []
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    detail: str = ""


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _TokenDetails | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion request: `prompt` as it is sent, and the number of tokens of the answer."""

    prompt: str | list[int]
    output_len: int


class _Stream(Exchange):
    """The answer to one completion request, read event by event."""

    def __init__(self) -> None:
        super().__init__()
        self.piece_at: list[float] = []
        self.first_event_at: float | None = None
        self.last_at: float | None = None
        self.usage: _Usage | None = None
        self.finish_reason: str | None = None
        self.is_ended = False

    def on_body(self, data: bytes, now_s: float) -> None:
        if self.status != 200:
            super().on_body(data, now_s)
            return
        self.body += data
        if b"\n" not in data:
            if len(self.body) > MAX_LINE_BYTES:
                self.fail("bad_answer", f"a line has over {MAX_LINE_BYTES} bytes")
            return
        *lines, rest = self.body.split(b"\n")
        self.body = rest
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(bytes(line[5:]).strip(), now_s)

    def on_end(self) -> None:
        if self.status != 200:
            self.fail(f"http_{self.status}", _error_text(bytes(self.body)))
        elif not self.is_ended:
            self.fail("dropped", "the stream ended without [DONE]")
        elif self.usage is None:
            self.fail("no_usage", "the stream held no usage")
        elif self.last_at is None:
            self.fail("bad_answer", "the stream held no choice")

    def _on_event(self, payload: bytes, now_s: float) -> None:
        self.progress_s = now_s
        if payload == b"[DONE]":
            self.is_ended = True
            return
        try:
            event = _decode_event(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.fail("bad_answer", f"an event is not a completion: {error!s:.100}")
            return
        if event.error is not None:
            self.fail("stream_error", _error_text(payload))
            return
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices:
            self.last_at = now_s
            if self.first_event_at is None:
                self.first_event_at = now_s
            if choice.text and (not self.piece_at or self.piece_at[-1] != now_s):
                self.piece_at.append(now_s)  # pieces that arrive together count as one
            self.finish_reason = choice.finish_reason or self.finish_reason


class CompletionServer:
    """The `/v1` routes of a server that a measurement needs."""

    def __init__(self, client: HttpClient, model: str, *, temperature: float) -> None:
        self._client = client
        self._model = model
        self._temperature = temperature

    async def measure(
        self, request: Completion, *, index: int, began_s: float, due_s: float | None = None
    ) -> Sample:
        """Send one request and wait for its end; a failure is in the sample, not raised.

        Args:
            request: the request to send.
            index: number for the sample.
            began_s: zero of the clock of the sample's start.
            due_s: due time for the sample.
        """
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": request.prompt,
                "max_tokens": request.output_len,
                "temperature": self._temperature,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        stream = _Stream()
        sent_s = perf_counter()
        sample = Sample(index, sent_s - began_s, request.output_len, due_s)
        try:
            await self._client.run("POST", "/v1/completions", stream, body)
        except ExchangeError as error:
            sample.error = error.kind
            sample.detail = str(error)[:_MAX_DETAIL]
        _fill(sample, stream, sent_s)
        return sample


def _fill(sample: Sample, stream: _Stream, sent_s: float) -> None:
    sample.piece_s = [round(at - sent_s, 6) for at in stream.piece_at]
    first_at = stream.piece_at[0] if stream.piece_at else stream.first_event_at
    if first_at is not None and stream.last_at is not None:
        sample.first_s = first_at - sent_s
        sample.latency_s = stream.last_at - sent_s
    sample.finish_reason = stream.finish_reason
    if stream.usage is not None:
        sample.prompt_tokens = stream.usage.prompt_tokens
        sample.completion_tokens = stream.usage.completion_tokens
        details = stream.usage.prompt_tokens_details
        sample.cached_tokens = (details.cached_tokens if details is not None else None) or 0


def _error_text(body: bytes) -> str:
    """The message in a server's error, or the beginning of its body."""
    text = body[: 4 * _MAX_DETAIL].decode(errors="replace")
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return text
    for key in ("error", "message"):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
    return value if isinstance(value, str) else text
