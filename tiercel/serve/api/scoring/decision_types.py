"""Types of the Decisions API: the request and its answers.

Source: the reference of OpenAI's Decisions API (public beta).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Struct

MAX_INPUT_CHARS: Final = 10_485_760
MAX_QUESTIONS: Final = 400
MAX_OPTIONS: Final = 255


class DecisionPart(Struct, kw_only=True):
    """A content part: `input_text`, `input_json`, `output_text` or `refusal`."""

    type: str
    text: str | None = None
    data: object = UNSET
    refusal: str | None = None


Content = str | list[DecisionPart]
CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class DecisionItem(Struct, kw_only=True):
    """An item of the input: a message, a call, or the output of one."""

    type: str = "message"
    role: Literal["user", "developer", "system", "assistant"] | None = None
    content: Content | None = None
    call_id: CallId | None = None
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    arguments: str | None = None
    input: str | None = None
    output: Content | None = None
    # Fields of an item from an earlier response.
    id: object = UNSET
    status: object = UNSET


class PredicateQuestion(Struct, tag_field="type", tag="predicate", kw_only=True):
    """How likely is it that this is true?"""

    instructions: Content
    name: str | None = None


class Choice(Struct, kw_only=True):
    """One option of a choice."""

    value: str | bool
    description: str | None = None


class ChoiceQuestion(Struct, tag_field="type", tag="choice", kw_only=True):
    """Which of these is it?"""

    instructions: Content
    choices: Annotated[list[Choice], Meta(min_length=2, max_length=MAX_OPTIONS)]
    name: str | None = None


class Level(Struct, kw_only=True):
    """One level of a score."""

    label: str
    description: str | None = None


class ScoreQuestion(Struct, tag_field="type", tag="score", kw_only=True):
    """Which level does it reach? Levels are listed lowest first."""

    instructions: Content
    levels: Annotated[list[Level], Meta(min_length=2, max_length=MAX_OPTIONS)]
    name: str | None = None


Question = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class DecisionsRequest(Struct, kw_only=True):
    """An input, and questions about it."""

    model: str
    input: Annotated[str, Meta(max_length=MAX_INPUT_CHARS)] | list[DecisionItem]
    questions: list[Question]
    debug: bool = False
    safety_identifier: object = UNSET
    prompt_cache_key: object = UNSET
    prompt_cache_options: object = UNSET
    user: object = UNSET
    metadata: object = UNSET


class PredicateAnswer(Struct, frozen=True, tag_field="type", tag="predicate", kw_only=True):
    """The probability of yes."""

    name: str | None
    probability: float


class ChoiceProbability(Struct, frozen=True):
    """Probability of one option."""

    value: str | bool
    probability: float


class ChoiceAnswer(Struct, frozen=True, tag_field="type", tag="choice", kw_only=True):
    """The likeliest option; `confidence` is 0 where all are equal and 1 where one is certain."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class LevelProbability(Struct, frozen=True):
    """Probability of one level; `value` counts from 0."""

    value: int
    label: str
    probability: float


class ScoreAnswer(Struct, frozen=True, tag_field="type", tag="score", kw_only=True):
    """The mean level; `confidence` falls with the spread around it."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


Answer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class InputDetails(Struct, frozen=True):
    """Input tokens found in the prefix cache, and tokens written to it."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Struct, frozen=True):
    """Output tokens; nothing is generated."""

    reasoning_tokens: int = 0


class DecisionUsage(Struct, frozen=True, kw_only=True):
    """Tokens of the shared input, once, and of all questions."""

    input_tokens: int
    input_tokens_details: InputDetails
    total_tokens: int
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()


class DecisionsAnswer(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The answers in the order of the questions.

    `label_mass` comes with `debug`: per question, the total probability of its labels among all
    tokens. A small value means that the model would rather have said something else.
    """

    model: str
    answers: list[Answer]
    usage: DecisionUsage
    label_mass: list[float] | None = None
