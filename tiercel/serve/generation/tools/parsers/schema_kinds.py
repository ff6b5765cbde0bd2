"""How a property's value is written in formats whose strings have no quotes, by its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_MAX_STEPS: Final = 32


@dataclass(frozen=True, slots=True)
class ValueKind:
    """How a value is written.

    Attributes:
        is_text: whether it is always a string.
        choices: allowed strings, if the schema lists them.
        document: schema that only values other than strings satisfy, if that is certain.
    """

    is_text: bool = False
    choices: tuple[str, ...] = ()
    document: Mapping[str, Any] | None = None


def read_property(schema: Mapping[str, Any], name: str) -> object:
    """The schema of a property; None if there is none."""
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None


def value_kind(value: object, root: Mapping[str, Any]) -> ValueKind:
    """How values of a schema are written.

    Args:
        value: schema of a property.
        root: document that its references point into.
    """
    target = resolve(value, root)
    if not isinstance(target, dict):
        return ValueKind()
    choices = [target["const"]] if "const" in target else target.get("enum")
    if isinstance(choices, list) and choices:
        texts = tuple(choice for choice in choices if isinstance(choice, str))
        if len(texts) == len(choices):
            return ValueKind(is_text=True, choices=texts)
        return ValueKind() if texts else _document(target, root)
    kinds = target.get("type")
    if kinds == "string":
        return ValueKind(is_text=True)
    if isinstance(kinds, str | list) and "string" not in kinds:
        return _document(target, root)
    return ValueKind()


def resolve(value: object, root: Mapping[str, Any]) -> object:
    """The schema that references point to; None if there is none."""
    for _ in range(_MAX_STEPS):
        if not isinstance(value, dict) or not isinstance(value.get("$ref"), str):
            return value
        target: object = root
        for part in value["$ref"].removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, dict) else None
        value = target
    return None


def _document(schema: Mapping[str, Any], root: Mapping[str, Any]) -> ValueKind:
    """A part of a schema as a separate document, with the definitions that it refers to."""
    text = json.dumps(schema)
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    text += json.dumps(definitions) if '"$ref"' in text else ""
    if '"$ref": "#"' in text or '"$ref": "#/properties' in text:
        return ValueKind()  # it refers to schemas outside of the document
    return ValueKind(document={**schema, **definitions})
