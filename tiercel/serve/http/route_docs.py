"""The description of a route as data, from which `openapi.py` makes `/openapi.json`.

Each route module has a tuple `DOCS` next to its `routes`; a test compares the two.
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
        path: path of the router; its parameters are strings.
        summary: summary in one sentence.
        body: type of the request body; None: it has none.
        answer: type of the response with status 200; None: it is not JSON.
        method: HTTP method.
        aliases: other paths of the same route.
        streams: whether the response may be an event stream.
        errors: error statuses besides 401, 403, 500 and those of a body.
        is_anthropic: whether errors have Anthropic's format.
        media_type: media type of a response without an `answer` type.
        answer_503: type of a response with status 503 that is no error.
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
