"""Routes that answer a body with the model."""

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
Answer = Callable[[ServerState, ServedModel, Request, T], Coroutine[None, None, Response]]


def model_routes(
    state: ServerState, paths: Sequence[str], type_: type[T], answer: Answer[T]
) -> list[BaseRoute]:
    """A POST route for each path.

    Args:
        state: of the server; its model must be ready when a request comes.
        paths: that mean the same.
        type_: the body, a msgspec struct.
        answer: cancelled when the client leaves.
    """

    async def create(request: Request) -> Response:
        model = state.ready_model()
        body = await read_body(request, type_, state.settings.limits)
        return await while_connected(request, answer(state, model, request, body))

    return [Route(path, create, methods=["POST"]) for path in paths]
