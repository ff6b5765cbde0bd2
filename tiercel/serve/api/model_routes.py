"""POST routes that need the model: read the body, check the model, respond."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tiercel.serve.api.request_body import read_body
from tiercel.serve.api.streaming_response import while_connected
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import ServerState

T = TypeVar("T")
Handler = Callable[[ServerState, ServedModel, Request, T], Coroutine[None, None, Response]]


def model_routes(
    state: ServerState, paths: Sequence[str], type_: type[T], handler: Handler[T]
) -> list[BaseRoute]:
    """A POST route for each path.

    Args:
        state: state of the server; a request before its model is ready gets 503.
        paths: paths of the route.
        type_: type of the body, a msgspec struct.
        handler: makes the response; cancelled when the client disconnects.
    """

    async def create(request: Request) -> Response:
        model = state.ready_model()
        body = await read_body(request, type_, state.settings.limits)
        return await while_connected(request, handler(state, model, request, body))

    return [Route(path, create, methods=["POST"]) for path in paths]
