"""What a route takes and gives, as data: `openapi.py` writes the description of the API from it.

Each route module has a tuple `DOCS` beside its `routes`; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from msgspec import Struct

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """One method of one path.

    Attributes:
        path: as the router has it; its parameters are strings.
        summary: one sentence.
        body: type of the request's body; None: it has none.
        answer: type of the answer with status 200; None: it is no JSON.
        method: the method.
        aliases: other paths of the same route.
        streams: whether it may answer with events instead.
        errors: statuses that it may answer with, besides 401, 403, 500 and those of a body.
        is_anthropic: whether errors have Anthropic's shape.
        media_type: of an answer that has no `answer` type.
        answer_503: type of an answer with status 503 that is no error.
    """

    path: str
    summary: str
    body: type[Struct] | None = None
    answer: type[Struct] | None = None
    method: Literal["get", "post"] = "get"
    aliases: tuple[str, ...] = ()
    streams: bool = False
    errors: tuple[int, ...] = ()
    is_anthropic: bool = False
    media_type: str = JSON
    answer_503: type[Struct] | None = None
