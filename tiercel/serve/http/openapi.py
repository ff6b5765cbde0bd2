"""`/openapi.json`: the description of the API, made from the types that the routes use."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tiercel.serve.http.errors import JSON_TYPE, AnthropicErrorBody, ErrorBody
from tiercel.serve.http.route_docs import EVENTS, JSON, RouteDoc
from tiercel.version import __version__

PATH: Final = "/openapi.json"
DOCS: Final = (RouteDoc(PATH, "This description."),)
_EVENT: Final = {  # one event of a stream; `data` is JSON, or [DONE]
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
_REF: Final = "#/components/schemas/{name}"
_REASONS: Final = {
    400: "The request is wrong; `param` names the field.",
    401: "No key, or a wrong one.",
    403: "The Host header holds a name that this server does not answer to.",
    404: "No such model.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests wait; Retry-After says when to come back.",
    500: "A fault of the server; its log tells more under the request's id.",
    503: "Not ready; Retry-After says when to come back.",
}
_ALWAYS: Final = (400, 401, 403, 500)
_WITH_BODY: Final = (408, 413, 415)
_PARAMETER: Final = re.compile(r"{(\w+)}")


def routes(docs: Iterable[RouteDoc]) -> list[BaseRoute]:
    """The route that describes `docs` and itself."""
    all_docs = [*docs, *DOCS]
    written: list[bytes] = []  # made at the first request: it takes 20 ms and is rarely needed

    async def openapi(_request: Request) -> Response:
        if not written:
            written.append(await asyncio.to_thread(_write, all_docs))
        return Response(written[0], media_type=JSON_TYPE)

    return [Route(PATH, openapi)]


def _write(docs: Sequence[RouteDoc]) -> bytes:
    return msgspec.json.encode(describe(docs))


def describe(docs: Sequence[RouteDoc]) -> dict[str, Any]:
    """The whole description, as OpenAPI 3.1."""
    types: dict[type[Struct], None] = {ErrorBody: None, AnthropicErrorBody: None}
    for doc in docs:
        types |= dict.fromkeys(t for t in (doc.body, doc.answer, doc.answer_503) if t is not None)
    schemas, components = msgspec.json.schema_components(
        list(types), ref_template=_REF, schema_hook=_anything
    )
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for doc in docs:
        for path in (doc.path, *doc.aliases):
            paths.setdefault(path, {})[doc.method] = _operation(doc, path, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tiercel", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _anything(_type: type) -> dict[str, Any]:
    """The schema of `object`; an empty schema would count as none."""
    return {"description": "Any JSON value."}


def _operation(
    doc: RouteDoc, path: str, schema_of: dict[type[Struct], dict[str, Any]]
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{doc.method}{re.sub(r'[^a-z0-9]+', '_', path.lower()).rstrip('_')}",
        "summary": doc.summary,
        "responses": _responses(doc, schema_of),
    }
    if doc.body is not None:
        content = {JSON: {"schema": schema_of[doc.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    names = _PARAMETER.findall(path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return operation


def _responses(doc: RouteDoc, schema_of: dict[type[Struct], dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {doc.media_type: {}}
    if doc.answer is not None:
        content = {JSON: {"schema": schema_of[doc.answer]}}
    if doc.streams:
        content[EVENTS] = {"schema": _EVENT}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    error = schema_of[AnthropicErrorBody if doc.is_anthropic else ErrorBody]
    statuses = {*_ALWAYS, *doc.errors, *(_WITH_BODY if doc.body is not None else ())}
    for status in sorted(statuses):
        is_answer = status == 503 and doc.answer_503 is not None
        schema = schema_of[doc.answer_503] if is_answer and doc.answer_503 else error
        responses[str(status)] = {
            "description": _REASONS[status],
            "content": {JSON: {"schema": schema}},
        }
    return responses
