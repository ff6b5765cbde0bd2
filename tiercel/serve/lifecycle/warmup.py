"""Warm-up requests through the whole server, before it is ready.

The first request to a route makes the decoder of its body, fills caches of types and starts
threads, on both sides of the socket to the engine: 2 ms of a time to first token of 4 ms. So each
route that generates or scores gets warm-up requests, through a separate state: its metrics are
discarded, nothing is logged, and at the end the engine forgets its counts and cached blocks. An
engine that is restarted warms up its own side (`ipc/startup.py`); the server's side is warm by
then.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec
from starlette.types import ASGIApp, Message, Scope

from tiercel.errors import TiercelError
from tiercel.ipc.messages import EngineInfo
from tiercel.serve.http.errors import new_request_id
from tiercel.serve.http.logs import REQUEST_LOG, RequestLog
from tiercel.serve.http.metrics import Metrics
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import ServerState

_LOG: Final = logging.getLogger(__name__)
MakeApp = Callable[[ServerState], ASGIApp]
# Whether each round streams. On a GPU, whose steps are short, both kinds run twice: there the
# interpreter's own adaptation matters. Scores are never streams.
_ROUNDS: Final = {"cpu": (True,), "cuda": (True, False, True, False)}
_MESSAGES: Final = ({"role": "user", "content": "Hi"},)
_NUM_NEW: Final = 2  # tokens
_LONG_PROMPT: Final = 1000  # tokens
_Bodies = tuple[tuple[str, dict[str, object]], ...]
_GENERATING: Final[_Bodies] = (
    ("/v1/chat/completions", {"messages": _MESSAGES, "max_completion_tokens": _NUM_NEW}),
    ("/v1/messages", {"messages": _MESSAGES, "max_tokens": _NUM_NEW}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": _NUM_NEW}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": _NUM_NEW}),
    ("/v1/completions", {"prompt": [0, 1, 2], "max_tokens": _NUM_NEW, "temperature": 0}),
)
_QUESTION: Final = {"type": "predicate", "instructions": "Is it so?"}
_SCORING: Final[_Bodies] = (
    ("/v1/score", {"query": "Hi", "items": ["a", "b"], "labels": ["x", "y"]}),
    ("/v1/rerank", {"query": "Hi", "documents": ["a", "b"]}),
    ("/v1/decisions", {"input": "Hi", "questions": [_QUESTION]}),
    ("/v1/embeddings", {"input": "Hi"}),
)


def _bodies(info: EngineInfo, number: int, *, is_stream: bool) -> _Bodies:
    """Requests of a round; on a GPU with a long prompt, a new one in each round."""
    generating = _GENERATING
    if info.device != "cpu":
        prompt = [number] * min(_LONG_PROMPT, info.max_model_len // 2)
        long = {"prompt": prompt, "max_tokens": _NUM_NEW, "temperature": 0}
        generating += (("/v1/completions", long),)
    streams = tuple((path, {"stream": is_stream, **fields}) for path, fields in generating)
    return streams + _SCORING


async def warm_up(
    state: ServerState,
    model: ServedModel,
    make_app: MakeApp,
    report: Callable[[int, int], None],
) -> None:
    """Send requests to every route that generates or scores; a refusal is no failure.

    Args:
        state: state of the server, which has no model yet.
        model: model that it will serve.
        make_app: makes the routes of a state.
        report: called with the number of finished requests and their total.
    """
    warmup_state = replace(
        state,
        settings=replace(state.settings, logs_prompts=False),
        metrics=Metrics(),
        model=model,
        tracing=None,
    )
    app = make_app(warmup_state)
    rounds = _ROUNDS[model.info.device.partition(":")[0]]
    requests = [
        body
        for number, is_stream in enumerate(rounds)
        for body in _bodies(model.info, number, is_stream=is_stream)
    ]
    for done, (path, fields) in enumerate(requests):
        report(done, len(requests))
        await _post(app, path, msgspec.json.encode({"model": model.name, **fields}))
    report(len(requests), len(requests))
    await state.client.forget()
    gc.collect()
    gc.freeze()  # objects so far stay: collections during a request need not visit them


async def _post(app: ASGIApp, path: str, body: bytes) -> None:
    """Post a body and read the whole response."""
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "tiercel.request_id": new_request_id(),
        REQUEST_LOG: RequestLog(),
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # the client stays connected
        raise AssertionError

    async def send(_message: Message) -> None:
        pass

    try:
        await app(scope, receive, send)
    except TiercelError:  # no template, a short context, a restart
        pass
    except Exception:  # noqa: BLE001 - the request boundary, without a client
        _LOG.exception("a warm-up request failed")
