"""Child process that compiles and renders chat templates, which are untrusted.

The sandbox stops attribute escapes, but neither two nested loops, nor a power tower (folded while
the template compiles), nor a string of 10^10 characters. So this process limits its own memory and
time, the parent kills it at its deadline, and it has no secret: no environment, no files but its
own libraries.

Messages, in the frames of `child_client.py`; the first one out is ``ready``, with
``is_limited``: whether the kernel bounds its memory. In:
``source``, ``context`` (null: compile only), ``max_chars``, ``cpu_seconds``. Out: ``text``, or
``error`` (``syntax``, ``raised``, ``failed``), ``message`` and, for syntax, ``line``.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn

sys.path.extend(sys.argv[2:])  # the folders of the packages

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tiercel.text.child_loop import answer_requests, limit_memory, write_message

if TYPE_CHECKING:
    from collections.abc import Mapping

KEPT_TEMPLATES = 4
KEPT_GLOBALS = frozenset({"range", "namespace"})  # `lipsum(n=...)` alone can run for ever
MESSAGE_CHARS = 500
# Errors that a template can cause; any other one ends the process, and the parent reports it.
FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,  # with RecursionError
    SyntaxError,  # Python's own compiler refuses what Jinja generated: too deep
    TypeError,
    ValueError,
)


class RaisedError(TemplateError):
    """The template called `raise_exception`."""


class OutputError(ValueError):
    """The template wrote more than its limit."""


def raise_exception(message: object) -> NoReturn:
    """End the rendering with a message of the template's author."""
    raise RaisedError(str(message))


def strftime_now(form: str) -> str:
    """The local time in a format of the template's choice."""
    return datetime.now().strftime(form)


def to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002, RUF100 - templates pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002, RUF100
) -> str:
    """JSON without HTML escapes: the filter that model templates expect."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def from_json(text: str) -> object:
    """The value of JSON text: a filter of llama.cpp's templates.

    Escapes are refused: they could spell a control token, which nothing would keep apart from those
    of the template. Arguments of calls are objects already when a template gets them.
    """
    if "\\" in text:
        raise ValueError("from_json takes no text with escapes")
    value: object = json.loads(text)
    return value


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox; a forbidden attribute is an immediate error, not an undefined value."""

    def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
        kind = type(obj).__name__
        raise SecurityError(f"access to attribute {attribute!r} of {kind!r} is forbidden")


def make_environment() -> Sandbox:
    """Jinja environment of Hugging Face templates, without loaders and globals that can hang."""
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    for name in set(environment.globals) - KEPT_GLOBALS:
        del environment.globals[name]
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.filters["tojson"] = to_json
    environment.filters["from_json"] = from_json
    return environment


def failure(kind: str, message: str) -> dict[str, object]:
    """An answer with an error."""
    return {"error": kind, "message": message[:MESSAGE_CHARS]}


class Renderer:
    """Renderer that compiles, keeps the last few templates, and renders under an output limit."""

    def __init__(self) -> None:
        self._environment = make_environment()
        self._compiled: dict[str, Template] = {}

    def answer(self, request: Mapping[str, object]) -> dict[str, object]:
        """Answer one request; see the module."""
        try:
            template = self._compile(str(request["source"]))
            context = request["context"]
            text = ""
            if isinstance(context, dict):
                text = self._render(template, context, int(str(request["max_chars"])))
        except TemplateSyntaxError as error:
            return failure("syntax", error.message or "") | {"line": error.lineno}
        except RaisedError as error:
            return failure("raised", str(error))
        except MemoryError:
            return failure("failed", "it used more memory than it may")
        except RecursionError:
            return failure("failed", "it is nested too deeply")
        except (TemplateError, *FAILURES) as error:
            return failure("failed", str(error))
        return {"text": text}

    def _compile(self, source: str) -> Template:
        if source not in self._compiled:
            while len(self._compiled) >= KEPT_TEMPLATES:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[source] = self._environment.from_string(source)
        return self._compiled[source]

    def _render(self, template: Template, context: dict[str, object], max_chars: int) -> str:
        pieces = []
        num_chars = 0
        for piece in template.generate(context):
            num_chars += len(piece)
            if num_chars > max_chars:
                raise OutputError(f"it wrote more than {max_chars} characters")
            pieces.append(piece)
        return "".join(pieces)


def main() -> None:
    """Answer requests until the parent ends."""
    renderer = Renderer()
    renderer.answer({"source": "{{ 1 }}", "context": {}, "max_chars": 1})  # imports lazy modules
    write_message({"ready": True, "is_limited": limit_memory()})
    answer_requests(renderer.answer)


if __name__ == "__main__":
    main()
