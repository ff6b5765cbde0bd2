"""Checks of a JSON schema before it is compiled: size, depth, references, minima.

The walk is iterative and stops at the limits, so a hostile schema costs no more than its bytes.
Whether each keyword can be enforced is decided by the compiler (`matcher.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final
from urllib.parse import unquote

from tiercel.errors import InvalidRequestError
from tiercel.params import LIMITS, Limits

# A multiple is checked digit by digit: an automaton of as many states as the number, and a hundred
# times the nodes. 10,007 takes 20 ms to compile, 1,000,003 takes 5 s and 200 MB (llguidance 1.9.1).
MAX_MULTIPLE: Final = 20_000
_MINIMA: Final = ("minItems", "minLength", "minProperties")
# Keywords whose values are data, in which nothing is a keyword.
_DATA: Final = frozenset({"const", "enum", "default", "examples", "example"})


def refuse(
    code: str, message: str, hint: str = "", param: str | None = None
) -> InvalidRequestError:
    """The error of a form that cannot be enforced: `invalid_schema` or `schema_too_complex`."""
    error = InvalidRequestError(message, hint=hint, param=param)
    error.code = code
    return error


def read_schema(text: str, max_tokens: int, limits: Limits = LIMITS) -> Mapping[str, Any] | bool:
    """Parse and check a schema.

    Args:
        text: JSON, as `StructuredOutputs` keeps it.
        max_tokens: tokens of the context.
        limits: limits of size and depth.

    Raises:
        InvalidRequestError: see `check_schema`.
    """
    schema: Mapping[str, Any] | bool = json.loads(text)
    check_schema(schema, max_tokens, limits)
    return schema


def check_schema(schema: Mapping[str, Any] | bool, max_tokens: int, limits: Limits = LIMITS) -> int:
    """Refuse a schema that is too big, refers out of the document, or cannot fit an answer.

    Args:
        schema: parsed JSON.
        max_tokens: tokens of the context; a minimum above it is refused.
        limits: limits of size and depth.

    Returns:
        The number of its nodes: all values, those inside of objects and arrays included.

    Raises:
        InvalidRequestError: code `schema_too_complex` or `invalid_schema`; the message names the
            keyword.
    """
    num_nodes = 0
    for node, depth, is_data in _walk(schema):
        num_nodes += 1
        if num_nodes > limits.max_schema_nodes:
            raise refuse(
                "schema_too_complex",
                f"the schema has more than {limits.max_schema_nodes} values.",
                "Use a smaller one.",
            )
        if depth > limits.max_schema_depth:
            raise refuse(
                "schema_too_complex",
                f"the schema is nested deeper than {limits.max_schema_depth} levels.",
                "Use a flatter one, or $defs.",
            )
        if isinstance(node, dict) and not is_data:
            _check_keywords(node, schema, max_tokens, limits)
    return num_nodes


def _walk(schema: object) -> Iterator[tuple[object, int, bool]]:
    """(value, depth, whether it is data and no schema), parents first."""
    stack: list[tuple[object, int, bool]] = [(schema, 1, False)]
    while stack:
        node, depth, is_data = stack.pop()
        yield node, depth, is_data
        if isinstance(node, dict):
            stack += [(child, depth + 1, is_data or key in _DATA) for key, child in node.items()]
        elif isinstance(node, list):
            stack += [(child, depth + 1, is_data) for child in node]


def _check_keywords(node: dict[str, Any], root: object, max_tokens: int, limits: Limits) -> None:
    for keyword in _MINIMA:
        value = node.get(keyword)
        if isinstance(value, int | float) and value > max_tokens:
            raise refuse(
                "schema_too_complex",
                f"{keyword} is {value:.6g} but an answer has at most {max_tokens} tokens.",
                "Lower it.",
            )
    multiple = node.get("multipleOf")
    if isinstance(multiple, int | float) and _digits(multiple) > MAX_MULTIPLE:
        raise refuse(
            "schema_too_complex",
            f"multipleOf is {multiple:.6g}; its digits may stand for at most {MAX_MULTIPLE}.",
            "Use a rounder number.",
        )
    patterns = [node.get("pattern"), *_keys(node.get("patternProperties"))]
    for pattern in patterns:
        if isinstance(pattern, str) and len(pattern.encode()) > limits.max_regex_bytes:
            raise refuse(
                "schema_too_complex",
                f"a pattern has more than {limits.max_regex_bytes} bytes.",
                "Use a shorter one.",
            )
    if isinstance(node.get("$ref"), str):
        _check_reference(node["$ref"], root)


def _keys(value: object) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _digits(value: float) -> int:
    """The digits of a decimal number as an integer, without its point and trailing zeros."""
    digits = "".join(str(digit) for digit in Decimal(str(value)).as_tuple().digits)
    return int(digits.rstrip("0")[:20] or "0")


def _check_reference(reference: str, root: object) -> None:
    """Follow a `$ref` until it names a schema that is not a reference itself."""
    seen: set[str] = set()
    target: object = {"$ref": reference}
    while isinstance(target, dict) and isinstance(target.get("$ref"), str):
        name = target["$ref"]
        if name in seen:
            raise refuse("invalid_schema", f"$ref {_shown(name)} leads back to itself.")
        if len(seen) > LIMITS.max_schema_depth:
            raise refuse("schema_too_complex", f"$ref {_shown(name)} leads from $ref to $ref.")
        seen.add(name)
        target = _resolve(name, root)


def _resolve(reference: str, root: object) -> object:
    """The value that a JSON pointer names within the document (RFC 6901, section 6)."""
    if reference != "#" and not reference.startswith("#/"):
        raise refuse(
            "invalid_schema",
            f"$ref {_shown(reference)} leads out of the schema; nothing is fetched.",
            "Use a reference that begins with #/.",
        )
    value = root
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isascii() and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise refuse("invalid_schema", f"$ref {_shown(reference)} names nothing.")
    return value


def _shown(reference: str) -> str:
    return f"{reference!r:.80}"
