"""One answer on its way: from the engine's updates to pieces, and past a bound on its thinking."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tiercel.grammar.spec import GrammarSpec
from tiercel.request.inputs import InputProcessor
from tiercel.request.request import Request, TokenUpdate
from tiercel.serve.generation.answer_text import AnswerText
from tiercel.serve.generation.events import ToolCallArguments, ToolCallStart
from tiercel.serve.generation.pieces import Piece
from tiercel.serve.generation.prompt_meter import PromptMeter
from tiercel.serve.generation.tools.parsers.reader import BrokenCallError, parse_json


@dataclass(frozen=True, slots=True)
class ThinkingBound:
    """How long the model may think. Past that its thinking is closed for it, and it must answer.

    Attributes:
        max_tokens: of the thinking, its opening marker included.
        closing: text that ends it.
        closing_ids: the same as tokens; the prompt of the rest ends with them.
        grammar: what the rest must match.
    """

    max_tokens: int
    closing: str
    closing_ids: tuple[int, ...]
    grammar: GrammarSpec | None


class Answer:
    """One answer on its way.

    Attributes:
        index: prompt * n + stream.
        request: what was asked of the engine first; prompt and cache are counted by it.
        running: what is asked of it now: the rest of an answer whose thinking was closed, or
            `request`.
        text: the answer so far.
        is_cut: its thinking has been closed and the rest must be asked for.
        first_token_s, last_token_s: `perf_counter` of these tokens.
        finish_reason: None until it is done.
        meter: of the progress of its prompt, if the client wants it.
    """

    def __init__(
        self, index: int, request: Request, text: AnswerText, bound: ThinkingBound | None
    ) -> None:
        self.index = index
        self.request = request
        self.running = request
        self.text = text
        self.is_cut = False
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.finish_reason: str | None = None
        self.meter: PromptMeter | None = None
        self._bound = bound
        self._arguments: list[str] | None = None  # of its last call, as far as they came

    def take(self, update: TokenUpdate) -> Piece:
        """Turn one update into a piece; the last one has the finish reason."""
        piece = Piece(self.index)
        reason = update.finish_reason
        last = len(update.new_token_ids) - 1
        for place, token_id in enumerate(update.new_token_ids):
            piece.events += self.text.push(token_id, ends=reason == "stop" and place == last)
            piece.token_ids.append(token_id)
            piece.logprobs += update.logprobs[place : place + 1]
            self.is_cut = self._thinks_too_long() and (reason is None or place < last)
            if self.text.matched is not None or self.is_cut:
                break
        piece.num_tokens = self.text.num_tokens
        if self.is_cut and self._bound is not None:
            piece.events += self.text.close_thinking(self._bound.closing)
        elif reason is not None or self.text.matched is not None:
            self._finish(piece, update)
        for event in piece.events:
            if isinstance(event, ToolCallStart):
                self._arguments = []
            elif isinstance(event, ToolCallArguments) and self._arguments is not None:
                self._arguments.append(event.text)
        if piece.finish_reason == "stop" and self._has_whole_calls():
            piece.finish_reason = "tool_calls"
        self.finish_reason = piece.finish_reason
        return piece

    def ask_for_rest(self, inputs: InputProcessor) -> Request:
        """The request that goes on behind the closed thinking."""
        assert self._bound is not None, "only a bound cuts an answer"
        first, done = self.request, self.text.num_tokens
        ids = [*first.prompt_token_ids, *first.output_token_ids[:done], *self._bound.closing_ids]
        params = replace(
            first.params,
            max_tokens=self._num_left,
            min_tokens=min(self._num_left, max(0, first.params.min_tokens - done)),
            prompt_logprobs=None,
        )
        rest = inputs.request(ids, params, first.stream, grammar=self._bound.grammar)
        rest.seed, rest.priority = first.seed, first.priority
        rest.request_id, rest.client = first.request_id, first.client
        self.running, self.is_cut = rest, False
        return rest

    @property
    def _num_left(self) -> int:
        closing = 0 if self._bound is None else len(self._bound.closing_ids)
        return self.request.max_tokens - self.text.num_tokens - closing

    def _has_whole_calls(self) -> bool:
        """Whether there are calls to carry out: a stop string may have cut the last one."""
        if self._arguments is None:
            return False
        try:
            return isinstance(parse_json("".join(self._arguments)), dict)
        except BrokenCallError:
            return False

    def _thinks_too_long(self) -> bool:
        bound, text = self._bound, self.text
        if bound is None or not text.is_thinking or text.num_reasoning_tokens < bound.max_tokens:
            return False
        return self._num_left > 0

    def _finish(self, piece: Piece, update: TokenUpdate) -> None:
        piece.events += self.text.finish()
        if self.text.matched is not None:
            piece.finish_reason, piece.stop_reason = "stop", self.text.matched
            return
        # An end token of the model's own is no reason worth telling.
        is_asked = update.stop_reason in self.request.params.stop_token_ids
        piece.finish_reason = update.finish_reason
        piece.stop_reason = update.stop_reason if is_asked else None
