"""Grammars of values in notations that resemble JSON: Python literals and Gemma's.

Enforced are the type, `enum` and `const`, the properties and `required`, the items of lists, and
references within the schema. Limits and patterns are not enforced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tiercel.grammar.lark import LarkWriter, either, literal
from tiercel.serve.generation.tools.parsers.schema_kinds import resolve
from tiercel.serve.generation.tools.parsers.tagged_calls import properties_of

_INTEGER: Final = r"/-?(0|[1-9][0-9]{0,18})/"
_NUMBER: Final = r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/"


@dataclass(frozen=True, slots=True)
class Notation:
    """How values are written, as Lark elements.

    Attributes:
        text: any string, quotes included.
        quoted: a given string, quotes included.
        words: words for true, false and null.
        key: name of a property, up to the value.
        any_key: any name of a property, up to the value.
        comma: separator between items.
    """

    text: str
    quoted: Callable[[str], str]
    words: tuple[str, str, str]
    key: Callable[[str], str]
    any_key: str
    comma: str


class LiteralGrammar:
    """Writes the rules of values of one schema.

    Args:
        lark: writer of the rules.
        notation: notation of values.
        root: document that references point into.
    """

    def __init__(self, lark: LarkWriter, notation: Notation, root: Mapping[str, Any]) -> None:
        self._lark = lark
        self._notation = notation
        self._root = root
        self._any: str | None = None
        self._by_reference: dict[str, str] = {}

    def value(self, schema: object) -> str:
        """Elements for a value of a schema."""
        if not isinstance(schema, dict):
            return self._any_value()
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in self._by_reference:
                name = self._by_reference[reference] = self._lark.reserve("value")
                self._lark.define(name, self.value(resolve(schema, self._root)))
            return self._by_reference[reference]
        for keyword in ("anyOf", "oneOf"):
            options = schema.get(keyword)
            if isinstance(options, list) and options:
                return either(self.value(option) for option in options)
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list) and choices:
            return either(self._constant(choice) for choice in choices)
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            return either(self.value({**schema, "type": kind}) for kind in kinds)
        return self._of_type(kinds, schema)

    def _of_type(self, kind: object, schema: Mapping[str, Any]) -> str:
        notation = self._notation
        yes, no, null = map(literal, notation.words)
        simple = {
            "string": notation.text,
            "integer": _INTEGER,
            "number": _NUMBER,
            "boolean": either((yes, no)),
            "null": null,
        }
        if isinstance(kind, str) and kind in simple:
            return simple[kind]
        if kind == "array":
            return self._list(self.value(schema.get("items")))
        if kind == "object":
            return self._object(schema)
        return self._any_value()

    def _list(self, item: str) -> str:
        item = self._lark.rule("item", item)
        return self._lark.rule("list", f'"[" ({item} ({self._notation.comma} {item})*)? "]"')

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = properties_of(schema)
        if not properties and schema.get("additionalProperties") is False:
            inner = ""
        elif not properties:
            pair = self._lark.rule("pair", f"{self._notation.any_key} {self._any_value()}")
            inner = f"({pair} ({self._notation.comma} {pair})*)?"
        else:
            inner = self.pairs(
                (f"{self._notation.key(name)} {self.value(value)}", is_required)
                for name, (value, is_required) in properties.items()
            )
        return self._lark.rule("object", f'"{{" {inner} "}}"')

    def pairs(self, pairs: Iterable[tuple[str, bool]]) -> str:
        """Elements for these pairs in order, with commas between; optional pairs may be absent."""
        lark, comma = self._lark, self._notation.comma
        later = first = ""  # what follows after another pair, or as the first
        for elements, is_required in reversed(list(pairs)):
            pair = lark.rule("pair", elements)
            if is_required:
                first, later = f"{pair} {later}", f"{comma} {pair} {later}"
            else:
                rest = lark.rule("rest", later) if later.strip() else ""
                options = [f"{pair} {rest}", first.strip()]
                first = either(filter(None, options)) + ("" if first.strip() else "?")
                later = f"({comma} {pair})? {rest}"
        return first

    def _constant(self, value: object) -> str:
        notation = self._notation
        if isinstance(value, str):
            return notation.quoted(value)
        if value is None or isinstance(value, bool):
            return literal(notation.words[2 if value is None else int(not value)])
        if isinstance(value, int | float):
            return literal(json.dumps(value))
        if isinstance(value, list):
            items = f" {notation.comma} ".join(self._constant(item) for item in value)
            return f'"[" {items} "]"'
        assert isinstance(value, dict), "JSON has no other values"
        pairs = f" {notation.comma} ".join(
            f"{notation.key(key)} {self._constant(item)}" for key, item in value.items()
        )
        return f'"{{" {pairs} "}}"'

    def _any_value(self) -> str:
        if self._any is None:
            self._any = self._lark.reserve("any")
            pair = self._lark.rule("pair", f"{self._notation.any_key} {self._any}")
            inner = f"({pair} ({self._notation.comma} {pair})*)?"
            words = " | ".join(map(literal, self._notation.words))
            options = f'{self._notation.text} | {_NUMBER} | {words} | "{{" {inner} "}}"'
            self._lark.define(self._any, f"{options} | {self._list(self._any)}")
        return self._any
