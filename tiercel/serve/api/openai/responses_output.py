"""Responses and stream events of the Responses API.

A response is a list of items (reasoning, message, calls), one after another. Plain responses and
streams go through the same steps, so the items are the same; a plain response drops the events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiercel.errors import TiercelError
from tiercel.params import SamplingDefaults
from tiercel.request.request import TokenLogprobs
from tiercel.serve.api.assembled_message import merge_events
from tiercel.serve.api.openai.completion_types import TokenLogprob
from tiercel.serve.api.openai.custom_tools import CustomInputParser
from tiercel.serve.api.openai.logprobs import chat_logprobs
from tiercel.serve.api.openai.responses_input import CUSTOM, HONOURED_TOOLS
from tiercel.serve.api.openai.responses_types import (
    Incomplete,
    InputDetails,
    OutputCall,
    OutputCustomCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningConfig,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    Status,
    TextConfig,
    TextFormat,
)
from tiercel.serve.api.sampling_fields import chosen, token_bound
from tiercel.serve.generation.generation import Generation
from tiercel.serve.generation.output_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallStart,
)
from tiercel.serve.generation.output_queue import CompletionDelta
from tiercel.serve.generation.usage import Usage
from tiercel.serve.http import sse
from tiercel.serve.http.errors import error_message
from tiercel.serve.http.object_fields import created_now, new_object_id
from tiercel.text.tokenizer import Tokenizer


def new_response(body: ResponsesRequest, name: str, defaults: SamplingDefaults) -> ResponseObject:
    """The response before anything is generated: it repeats the parameters of the request."""
    text = body.text or TextConfig()
    return ResponseObject(
        id=new_object_id("resp_"),
        created_at=created_now(),
        model=name,
        status="in_progress",
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=chosen(body.temperature, defaults.temperature, 1.0),
        top_p=chosen(body.top_p, defaults.top_p, 1.0),
        tool_choice=body.tool_choice or "auto",
        tools=[tool for tool in body.tools or () if tool.type in HONOURED_TOOLS],
        text=TextConfig(format=text.format or TextFormat(), verbosity=text.verbosity),
        reasoning=body.reasoning or ReasoningConfig(),
        truncation=body.truncation or "disabled",
        top_logprobs=body.top_logprobs or 0,
        metadata=body.metadata or {},
        instructions=body.instructions,
        max_output_tokens=token_bound("max_output_tokens", body.max_output_tokens, None),
        user=body.user,
    )


class ResponsesWriter:
    """The wire format of one request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        response: ResponseObject,
        request_id: str,
        *,
        num_top: int | None,
    ) -> None:
        """Set up.

        Args:
            tokenizer: tokenizer of the model, for log-probabilities.
            response: response of `new_response`.
            request_id: id of the HTTP request, for errors.
            num_top: alternatives of each log-probability; None: no log-probabilities.
        """
        self._tokenizer = tokenizer
        self._response = response
        self._request_id = request_id
        self._num_top = num_top
        self._custom = frozenset(tool.name for tool in response.tools if tool.type == CUSTOM)
        self._input = CustomInputParser()  # of the custom tool call that is open
        self._item: OutputItem | None = None
        self._events: list[bytes] = []
        self._num_events = 0
        self._num_tokens = 0
        self._waiting_logprobs: list[TokenLogprob] = []  # of tokens before the first text

    def make_body(self, generation: Generation, completions: Sequence[CompletionDelta]) -> object:
        """The body of a plain response."""
        self._take(generation, completions[0])
        self._finish(generation.usage())
        return self._response

    def write_start(self, generation: Generation) -> bytes:
        """The events before the first token."""
        del generation
        self._emit("response.created", {"response": self._response})
        self._emit("response.in_progress", {"response": self._response})
        return self._flush()

    def write_delta(self, generation: Generation, delta: CompletionDelta) -> bytes:
        """The events of one delta."""
        self._take(generation, delta)
        return self._flush()

    def write_end(self, generation: Generation) -> bytes:
        """The event that holds the whole response."""
        self._finish(generation.usage())
        self._emit(f"response.{self._response.status}", {"response": self._response})
        return self._flush()

    def write_error(self, error: TiercelError) -> bytes:
        """The last event of a stream that failed."""
        code = "server_error" if error.http_status >= 500 else "invalid_prompt"
        response = self._response
        response.status = "failed"
        response.error = ResponseFailure(code, error_message(error, self._request_id))
        self._emit("response.failed", {"response": response})
        return self._flush()

    def write_keep_alive(self) -> bytes:
        """A keep-alive comment."""
        return sse.KEEP_ALIVE

    def _take(self, generation: Generation, delta: CompletionDelta) -> None:
        logprobs = self._waiting_logprobs + self._shown_logprobs(generation, delta)
        self._waiting_logprobs = []
        for event in merge_events(delta.events):
            if isinstance(event, ContentDelta):
                self._add_text(event.text, logprobs)
                logprobs = []
            else:
                self._add(event)
        if delta.finish_reason is None:
            if logprobs and isinstance(self._item, OutputMessage):
                self._add_text("", logprobs)
            elif not isinstance(self._item, OutputCall | OutputCustomCall):
                self._waiting_logprobs = logprobs  # half a character, or line ends after thinking
            return
        if not self._response.output or (logprobs and isinstance(self._item, OutputMessage)):
            self._add_text("", logprobs)  # a response has at least an empty message
        is_whole = delta.finish_reason != "length"
        self._response.status = "completed" if is_whole else "incomplete"
        self._response.incomplete_details = None if is_whole else Incomplete()
        # Whole calls have the finish reason `tool_calls`: a stop string has cut this one.
        is_call = isinstance(self._item, OutputCall | OutputCustomCall)
        is_cut = delta.finish_reason == "stop" and is_call
        self._close("incomplete" if is_cut else self._response.status)

    def _shown_logprobs(self, generation: Generation, delta: CompletionDelta) -> list[TokenLogprob]:
        """Log-probabilities of the visible text, without those of reasoning, which comes first."""
        before, self._num_tokens = self._num_tokens, self._num_tokens + len(delta.token_ids)
        if self._num_top is None:
            return []
        skipped = max(0, generation.completions[0].output.num_reasoning_tokens - before)
        entries: list[TokenLogprobs] = delta.logprobs[skipped:]
        return chat_logprobs(self._tokenizer, entries, self._num_top)

    def _add(self, event: Event) -> None:
        if isinstance(event, ReasoningDelta):
            self._add_reasoning(event.text)
        elif isinstance(event, ToolCallStart):
            self._close("completed")
            if event.name in self._custom:
                self._input = CustomInputParser()
                self._open(OutputCustomCall(new_object_id("ctc_"), event.id, event.name))
            else:
                self._open(OutputCall(new_object_id("fc_"), event.id, event.name))
        elif isinstance(self._item, OutputCustomCall):
            self._add_input(self._item, self._input.push(event.text))
        else:
            assert isinstance(self._item, OutputCall), "arguments follow the start of their call"
            self._item.arguments += event.text
            self._emit_inside("response.function_call_arguments.delta", {"delta": event.text})

    def _add_input(self, item: OutputCustomCall, text: str) -> None:
        item.input += text
        if text:
            self._emit_inside("response.custom_tool_call_input.delta", {"delta": text})

    def _add_text(self, text: str, logprobs: list[TokenLogprob]) -> None:
        item = self._item
        if not isinstance(item, OutputMessage):
            self._close("completed")
            item = OutputMessage(new_object_id("msg_"), [])
            self._open(item)
            self._emit_part("response.content_part.added", {"part": OutputText()})
            item.content.append(OutputText())
        part = item.content[0]
        part.text += text
        part.logprobs += logprobs
        if text or logprobs:
            self._emit_part("response.output_text.delta", {"delta": text, "logprobs": logprobs})

    def _add_reasoning(self, text: str) -> None:
        item = self._item
        if not isinstance(item, OutputReasoning):
            self._close("completed")
            item = OutputReasoning(new_object_id("rs_"), [])
            self._open(item)
            self._emit_part("response.content_part.added", {"part": ReasoningText()})
            item.content.append(ReasoningText())
        item.content[0].text += text
        self._emit_part("response.reasoning_text.delta", {"delta": text})

    def _open(self, item: OutputItem) -> None:
        self._item = item
        self._response.output.append(item)
        self._emit_item("response.output_item.added", item)

    def _close(self, status: Status) -> None:
        item = self._item
        if item is None:
            return
        item.status = status
        if isinstance(item, OutputCustomCall):
            self._add_input(item, self._input.finish())
            self._emit_inside("response.custom_tool_call_input.done", {"input": item.input})
        elif isinstance(item, OutputCall):
            fields = {"name": item.name, "arguments": item.arguments}
            self._emit_inside("response.function_call_arguments.done", fields)
        elif isinstance(item, OutputReasoning):
            part = item.content[0]
            self._emit_part("response.reasoning_text.done", {"text": part.text})
            self._emit_part("response.content_part.done", {"part": part})
        else:
            text = item.content[0]
            said = {"text": text.text, "logprobs": text.logprobs}
            self._emit_part("response.output_text.done", said)
            self._emit_part("response.content_part.done", {"part": text})
        self._emit_item("response.output_item.done", item)
        self._item = None

    def _finish(self, usage: Usage) -> None:
        response = self._response
        if response.status == "completed":
            response.completed_at = created_now()
        response.usage = ResponseUsage(
            input_tokens=usage.prompt,
            input_tokens_details=InputDetails(usage.cached),
            output_tokens=usage.completion,
            output_tokens_details=OutputDetails(usage.reasoning),
            total_tokens=usage.prompt + usage.completion,
        )

    def _emit_item(self, name: str, item: OutputItem) -> None:
        self._emit(name, {"output_index": len(self._response.output) - 1, "item": item})

    def _emit_inside(self, name: str, fields: Mapping[str, object]) -> None:
        assert self._item is not None, "only an open item has events"
        place = {"item_id": self._item.id, "output_index": len(self._response.output) - 1}
        self._emit(name, {**place, **fields})

    def _emit_part(self, name: str, fields: Mapping[str, object]) -> None:
        self._emit_inside(name, {"content_index": 0, **fields})

    def _emit(self, name: str, fields: Mapping[str, object]) -> None:
        event = {"type": name, "sequence_number": self._num_events, **fields}
        self._events.append(sse.encode_event(event, name))
        self._num_events += 1

    def _flush(self) -> bytes:
        data = b"".join(self._events)
        self._events.clear()
        return data
