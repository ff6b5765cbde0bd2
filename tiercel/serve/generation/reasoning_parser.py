"""The reasoning parser: separates thinking from content by the markers around it.

    <think>
    What is asked is ...
    </think>

    The answer is 4.

Line ends next to a marker belong to the marker. If the chat template has opened the thinking in the
prompt, the output begins inside it. If the template has also closed it, or if the model opens it
itself, the output begins outside. Thinking comes once, at the start: a later marker is content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tiercel.errors import ArgumentError
from tiercel.grammar.spec import ThinkingForm
from tiercel.serve.generation.output_events import ContentDelta, Event, ReasoningDelta
from tiercel.serve.generation.tools.parsers.reader import open_end
from tiercel.text.tokenizer import Tokenizer

_TAIL_TOKENS: Final = 16  # of a prompt: enough to hold the markers that it may end with


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers of a model's thinking.

    Attributes:
        name: name in `--reasoning-parser`.
        opening: marker at its start.
        closing: marker at its end.
    """

    name: str
    opening: str
    closing: str

    def form(self, prompt_tail: str) -> ThinkingForm | None:
        """How the output after a prompt begins.

        Args:
            prompt_tail: end of the prompt as text, with the names of control tokens.

        Returns:
            None if the prompt has closed the thinking.
        """
        tail = prompt_tail.rstrip()
        if tail.endswith(self.closing.rstrip()):
            return None
        is_open = tail.endswith(self.opening.rstrip())
        return ThinkingForm(self.opening, self.closing, is_open=is_open)

    def needs_special(self, control_tokens: Mapping[str, int]) -> bool:
        """Whether the parser must see the names of control tokens in the text."""
        markers = (self.opening, self.closing)
        return any(name and name in marker for marker in markers for name in control_tokens)


_ALL: Final = (
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
)
FORMATS: Final = MappingProxyType({entry.name: entry for entry in _ALL})


def select_reasoning_format(template: str | None, name: str | None) -> ReasoningFormat | None:
    """Choose the markers of a model's thinking; pure.

    Args:
        template: source of the chat template; None if the model has none.
        name: `--reasoning-parser`: a name, ``none``, or None to choose by the template.

    Returns:
        None if the model does not think, or its thinking stays in the content.

    Raises:
        ArgumentError: no format has that name.
    """
    if name == "none" or (name is None and template is None):
        return None
    if name is not None:
        if name not in FORMATS:
            raise ArgumentError(
                f"reasoning_parser={name!r:.40} is unknown.",
                hint=f"Use none, {', '.join(FORMATS)}.",
            )
        return FORMATS[name]
    return next((entry for entry in _ALL if entry.closing in (template or "")), None)


def prompt_tail(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
    """The end of a prompt as text, for `ReasoningFormat.form`."""
    return tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)


class ThinkTagParser:
    """Parser of one completion; see `output_events.ReasoningParser`.

    Args:
        form: how the output begins.
    """

    def __init__(self, form: ThinkingForm) -> None:
        self._opening = form.opening
        self._closing = form.closing
        self._is_decided = form.is_open  # whether it is known that the output opens its thinking
        self._is_inside = form.is_open
        self._held = ""
        self._at_start = True  # of the thinking, or of the content after it
        self._lines = ""  # line ends that may turn out to precede the closing marker

    @property
    def is_inside(self) -> bool:
        """Whether the text so far ends within the thinking."""
        return self._is_inside

    def push(self, text: str) -> list[Event]:
        """Add text; return the events that are certain now."""
        self._held += text
        return self._run(is_final=False)

    def finish(self) -> list[Event]:
        """End the text; return what was held back."""
        events = self._run(is_final=True)
        if self._is_inside and self._lines:
            events.append(ReasoningDelta(self._lines))
            self._lines = ""
        return events

    def _run(self, *, is_final: bool) -> list[Event]:
        events: list[Event] = []
        if not self._is_decided and not self._decide(is_final=is_final):
            return events
        if self._is_inside:
            self._think(events, is_final=is_final)
        if not self._is_inside:
            self._content(events)
        return events

    def _decide(self, *, is_final: bool) -> bool:
        """Decide whether the output begins with the opening marker; False: not known yet."""
        begin = self._held.lstrip()
        if begin.startswith(self._opening):
            self._held = begin.removeprefix(self._opening)
            self._is_inside = True
        elif self._opening.startswith(begin) and not is_final:
            return False
        else:
            self._at_start = False
        self._is_decided = True
        return True

    def _think(self, events: list[Event], *, is_final: bool) -> None:
        text, marker, rest = self._held.partition(self._closing)
        if not marker:
            end = "" if is_final else open_end(text, (self._closing,))
            text, rest = text[: len(text) - len(end)], end
        self._held = rest
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        text = self._lines + text
        shown = text.rstrip("\n")
        self._lines = text[len(shown) :]
        if shown:
            events.append(ReasoningDelta(shown))
        if marker:
            self._is_inside = False
            self._at_start = True
            self._lines = ""

    def _content(self, events: list[Event]) -> None:
        text, self._held = self._held, ""
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        if text:
            events.append(ContentDelta(text))
