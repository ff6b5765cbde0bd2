"""The response header `x-tiercel-ignored`, which names the ignored fields of a request."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from starlette.requests import Request
from starlette.types import Scope

HEADER: Final = b"x-tiercel-ignored"
MAX_NAMES: Final = 32
_KEY: Final = "tiercel.ignored"  # key of the ASGI scope
_NAME: Final = re.compile(r"[\w.\[\]-]{1,100}", re.ASCII)  # what a header can hold


def note_ignored(request: Request, names: Iterable[str]) -> None:
    """Note fields of a request that have no effect here."""
    noted: dict[str, None] = request.scope.setdefault(_KEY, {})
    noted.update(dict.fromkeys(name for name in names if _NAME.fullmatch(name)))


def ignored_header(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The header of the response; none if no field was ignored."""
    names = list(scope.get(_KEY, ()))
    if not names:
        return []
    shown = names[:MAX_NAMES] + ["..."] * (len(names) > MAX_NAMES)
    return [(HEADER, ", ".join(shown).encode())]
