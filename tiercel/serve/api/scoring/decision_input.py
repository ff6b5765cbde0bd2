"""The input of a decision and its questions as text for a model.

Tool calls and their results become text, because templates differ in their support and none has
custom tools. Consecutive messages of one role become one, which every template accepts.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from tiercel.errors import InvalidRequestError
from tiercel.serve.api.scoring.decision_types import (
    Choice,
    ChoiceQuestion,
    Content,
    DecisionItem,
    DecisionPart,
    Level,
    PredicateQuestion,
    Question,
)
from tiercel.serve.http.errors import client_error, escaped

MAX_JSON_LEVELS: Final = 32
MAX_JSON_VALUES: Final = 10_000
MAX_JSON_BYTES: Final = 256 << 10
_CALLS: Final = {
    "function_call": "arguments",
    "custom_tool_call": "input",
}
_OUTPUTS: Final = {
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
}
_YES_NO: Final = ("Yes", "No")
_PREDICATE: Final = "{}\n\nIs this true? Answer with Yes or No only."
_CHOICE: Final = "{}\n\n{}\n\nAnswer with the letter of one option only."
_SCORE: Final = (
    "{}\n\nLevels, from lowest to highest:\n{}\n\nAnswer with the letter of one level only."
)
_TWO_LETTERS: Final = _CHOICE.replace("letter", "letters"), _SCORE.replace("letter", "letters")


def input_messages(given: str | Sequence[DecisionItem]) -> list[dict[str, object]]:
    """The messages of an input, with the roles system, developer, user and assistant.

    Raises:
        InvalidRequestError: naming the item; code `unsupported_content` if it is no text.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise _wrong("input", "is empty; give at least one item")
    calls: dict[str, tuple[str, str]] = {}  # by id: type and name
    messages: list[dict[str, object]] = []
    for place, item in enumerate(given):
        role, text = _item_text(item, f"input[{place}]", calls)
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] = f"{messages[-1]['content']}\n\n{text}"
        else:
            messages.append({"role": role, "content": text})
    return messages


def _item_text(
    item: DecisionItem, param: str, calls: dict[str, tuple[str, str]]
) -> tuple[str, str]:
    """Role and text of an item; `calls` collects the calls so far."""
    if item.type == "message":
        if item.role is None:
            raise _wrong(f"{param}.role", "must be given")
        return item.role, _text(
            item.content, f"{param}.content", is_answer=item.role == "assistant"
        )
    if item.type in _CALLS:
        field = _CALLS[item.type]
        sent: str | None = getattr(item, field)
        if item.call_id is None or item.name is None or sent is None:
            raise _wrong(param, f"needs call_id, name and {field}")
        if item.call_id in calls:
            raise _wrong(f"{param}.call_id", f"{escaped(repr(item.call_id), 80)} occurs twice")
        calls[item.call_id] = (item.type, item.name)
        return "assistant", f"Called {item.name} with: {sent}"
    if item.type in _OUTPUTS:
        kind, name = calls.get(item.call_id or "", ("", ""))
        if kind != _OUTPUTS[item.type]:
            shown = "missing" if item.call_id is None else escaped(repr(item.call_id), 80)
            needed = _OUTPUTS[item.type]
            raise _wrong(f"{param}.call_id", f"is {shown}; it must name an earlier {needed}")
        return "user", f"Result of {name}: {_text(item.output, f'{param}.output')}"
    known = ", ".join(("message", *_CALLS, *_OUTPUTS))
    raise client_error(
        400,
        "unsupported_content",
        f"{param} has the type {escaped(repr(item.type), 40)}.",
        hint=f"Types are {known}.",
        param=f"{param}.type",
    )


def _text(content: Content | None, param: str, *, is_answer: bool = False) -> str:
    if content is None:
        raise _wrong(param, "must be a string or a list of parts")
    if isinstance(content, str):
        return content
    parts = enumerate(content)
    return "\n".join(_part_text(part, f"{param}[{i}]", is_answer=is_answer) for i, part in parts)


def _part_text(part: DecisionPart, param: str, *, is_answer: bool) -> str:
    kinds = ("output_text", "refusal") if is_answer else ("input_text", "input_json")
    if part.type not in kinds:
        shown = escaped(repr(part.type), 40)
        why = "this model takes no images" if part.type == "input_image" else "here it cannot be"
        raise client_error(
            400,
            "unsupported_content",
            f"{param} has the type {shown}; {why}.",
            hint=f"Types are {' and '.join(kinds)}.",
            param=f"{param}.type",
        )
    if part.type == "input_json":
        if part.data is msgspec.UNSET:
            raise _wrong(f"{param}.data", "must be given")
        return _json_text(part.data, f"{param}.data")
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        field = "refusal" if part.type == "refusal" else "text"
        raise _wrong(f"{param}.{field}", "must be a string")
    return text


def _json_text(data: object, param: str) -> str:
    """Compact JSON, members in their original order."""
    level, values = [data], 0
    for depth in itertools.count(1):
        values += len(level)
        if values > MAX_JSON_VALUES:
            raise _wrong(param, f"has more than {MAX_JSON_VALUES} values")
        level = [value for value in level if isinstance(value, dict | list)]
        if not level:
            break
        if depth > MAX_JSON_LEVELS:
            raise _wrong(param, f"is nested deeper than {MAX_JSON_LEVELS} levels")
        level = [child for value in level for child in _children(value)]
    text = msgspec.json.encode(data)
    if len(text) > MAX_JSON_BYTES:
        raise _wrong(param, f"has {len(text)} bytes; the limit is {MAX_JSON_BYTES}")
    return text.decode()


def _children(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def question_text(question: Question, param: str) -> str:
    """The text of a question, which follows the input.

    Raises:
        InvalidRequestError: naming the field.
    """
    instructions = _text(question.instructions, f"{param}.instructions").strip()
    if not instructions:
        raise _wrong(f"{param}.instructions", "is empty; say what is asked")
    if isinstance(question, PredicateQuestion):
        return _PREDICATE.format(instructions)
    if isinstance(question, ChoiceQuestion):
        _check_unique(question.choices, f"{param}.choices")
    is_choice = isinstance(question, ChoiceQuestion)
    labels = answer_labels(question)
    lines = [
        f"{label}. {name}" if description is None else f"{label}. {name}: {description}"
        for label, (name, description) in zip(labels, _options(question), strict=True)
    ]
    forms = _TWO_LETTERS if len(labels[0]) > 1 else (_CHOICE, _SCORE)
    return forms[not is_choice].format(instructions, "\n".join(lines))


def _options(question: Question) -> Iterator[tuple[str, str | None]]:
    """Name and description of each option, in the order of the letters."""
    if isinstance(question, PredicateQuestion):
        return
    options: Sequence[Choice | Level]
    options = question.choices if isinstance(question, ChoiceQuestion) else question.levels
    for option in options:
        name = option.label if isinstance(option, Level) else option.value
        yield (name if isinstance(name, str) else str(name).lower()), option.description


def _check_unique(choices: Sequence[Choice], param: str) -> None:
    seen: set[tuple[type, str | bool]] = set()
    for place, choice in enumerate(choices):
        key = (type(choice.value), choice.value)
        if key in seen:
            shown = escaped(msgspec.json.encode(choice.value).decode(), 80)
            raise _wrong(f"{param}[{place}].value", f"{shown} occurs twice")
        seen.add(key)


def answer_labels(question: Question) -> tuple[str, ...]:
    """The labels of a question: Yes and No, or a letter per option, two from 27 options on."""
    if isinstance(question, PredicateQuestion):
        return _YES_NO
    count = len(question.choices if isinstance(question, ChoiceQuestion) else question.levels)
    letters = string.ascii_uppercase
    if count <= len(letters):
        return tuple(letters[:count])
    pairs = itertools.product(letters, repeat=2)
    return tuple(a + b for a, b in itertools.islice(pairs, count))


def _wrong(param: str, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {rule}.", param=param)
