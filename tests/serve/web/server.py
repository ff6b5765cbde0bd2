"""A stand-in for the server behind the web page: it serves the page's files and scripted answers.

What the last message says picks the script, so that a browser test is one line of typing. The
files go out under a policy stricter than the server's own: no inline code, no HTML from strings.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

WEB = Path(__file__).parents[3] / "tiercel/serve/web"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
POLICY = "default-src 'self'; require-trusted-types-for 'script'; form-action 'none'"
MODEL = "SmolLM2-135M-Instruct"
NUM_SLOW_TOKENS = 500
SLOW_SECONDS = 0.03  # between two of them

HOSTILE = """Look: <img src=x onerror="window.hacked = 1"> and <script>window.hacked = 2</script>

<iframe src="javascript:window.hacked = 3"></iframe> <svg onload="window.hacked = 4">

[click](javascript:window.hacked=5) [data](data:text/html,<script>window.hacked=6</script>)
[upper](JaVaScRiPt:window.hacked=7) <javascript:window.hacked=8> ![pic](http://192.0.2.1/leak.png)
[ref]: http://192.0.2.1/ "x" <a href="http://192.0.2.1/" onclick="window.hacked=9">a</a>

```"><img src=x onerror=window.hacked=10>
</code></pre><script>window.hacked = 11</script>
```

| a <img src=x onerror=window.hacked=12> | b |
|---|---|
| <script>window.hacked=13</script> | `<img src=x onerror=window.hacked=14>` |
"""

MARKDOWN = """# A heading

Some *emphasis*, some **strong words**, ***both***, ~~gone~~, `inline code` and a
[link](https://example.org/a_(b)?c=d&e=1). Bare: https://example.org/x_y_z, and snake_case_stays.

## Lists

1. First
   - nested one
   - nested two
2. Second, with `code`
3. Third

* [x] done
* [ ] open

> A quote with **weight**
> over two lines.

| Name | Tokens | Share |
|:-----|-------:|:-----:|
| prefill | 2,048 | 61 % |
| decode \\| verify | 512 | 39 % |

```python
# Merge two sorted lists.
def merge(left: list[int], right: list[int]) -> list[int]:
    return sorted(left + right)  # 2 lines, O(n log n)
```

---

Escaped \\*stars\\*, AT&amp;T, 2 * 3 * 4 and $$x_1 * y_1$$ \\(a_1 * b_1\\).
"""


def _cards() -> list[dict[str, Any]]:
    return [{"id": MODEL, "object": "model", "max_model_len": 8192}]


@dataclass(slots=True)
class Stage:
    """What the stand-in does, and what it saw; tests change and read it."""

    key: str | None = None
    status: str = "ready"
    progress: float = 0.0
    cards: list[dict[str, Any]] = field(default_factory=_cards)  # of the served models
    text: str | None = None  # the next answers, whatever the message
    is_reading: bool = False  # no token comes as long as this holds
    read: list[dict[str, Any]] = field(default_factory=list)  # what is said meanwhile, in order
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of chat requests
    num_cancelled: int = 0
    may_drop: bool = False  # whether the page has read what it may before its connection is lost
    base: str = ""  # http://127.0.0.1:port

    def reset(self) -> None:
        """Forget what was seen and set."""
        self.key, self.status, self.progress = None, "ready", 0.0
        self.cards = _cards()
        self.text, self.is_reading = None, False
        self.read.clear()
        self.bodies.clear()
        self.num_cancelled = 0
        self.may_drop = False


def _error(status: int, type_: str, code: str, message: str, **headers: str) -> JSONResponse:
    error = {"message": message, "type": type_, "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers=headers)


def _question(body: dict[str, Any]) -> str:
    """What was asked last: the page joins questions that had no answer."""
    return str(body["messages"][-1].get("content") or "").rpartition("\n\n")[2]


def _pieces(text: str) -> list[dict[str, Any]]:
    size = max(7, len(text) // 200)
    return [{"content": text[i : i + size]} for i in range(0, len(text), size)]


def _deltas(message: str, last: dict[str, Any], text: str | None) -> list[dict[str, Any]]:
    """The pieces of the scripted answer; of `text` if there is one."""
    if text is not None:
        return _pieces(text)
    if last["role"] == "tool":
        return [{"content": f"The function says **{last['content']}**."}]
    if "think" in message:
        words = [
            "The",
            "question",
            "asks",
            "for",
            "a",
            "sum.",
            "Two",
            "and",
            "two",
            "make",
            "four.",
        ]
        thoughts = [{"reasoning_content": f"{word} "} for word in words]
        return [*thoughts, {"content": "It is "}, {"content": "**4**."}]
    if "tool" in message:
        function = {"name": "get_weather", "arguments": ""}
        start = {"index": 0, "id": "call_a", "type": "function", "function": function}
        pieces = ['{"city": "Li', 'nz", "days"', ": 3}"]
        calls = [{"index": 0, "function": {"arguments": piece}} for piece in pieces]
        whole = [{"content": "Let me look."}, *({"tool_calls": [call]} for call in [start, *calls])]
        return whole[:3] if "half" in message else whole
    texts = {"hostile": HOSTILE, "markdown": MARKDOWN}
    text = next((text for name, text in texts.items() if name in message), None)
    if text is None:
        text = f"You said: {message}"
    return _pieces(text)


class _Answer:
    """One scripted stream."""

    def __init__(self, stage: Stage, body: dict[str, Any]) -> None:
        self.stage = stage
        self.body = body
        self.last = body["messages"][-1]
        self.message = _question(body)

    def _chunk(self, delta: dict[str, Any], num_tokens: int, finish: str | None) -> bytes:
        chunk = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
            "usage": {"prompt_tokens": 9, "completion_tokens": num_tokens},
        }
        return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()

    async def _progress(self) -> AsyncIterator[bytes]:
        """Chunks without a choice, for as long as the stage reads the prompt."""
        num_sent = 0
        while self.stage.is_reading:
            for progress in self.stage.read[num_sent:]:
                num_sent += 1
                chunk = {"object": "chat.completion.chunk", "choices": []}
                yield f"data: {json.dumps({**chunk, 'prompt_progress': progress})}\n\n".encode()
            await asyncio.sleep(0.005)

    async def stream(self) -> AsyncIterator[bytes]:
        is_slow = "slow" in self.message
        deltas = _deltas(self.message, self.last, self.stage.text)
        if is_slow:
            deltas = [{"content": f"word{i} "} for i in range(NUM_SLOW_TOKENS)]
        try:
            yield b": keep-alive\n\n"
            yield self._chunk({"role": "assistant", "content": ""}, 0, None)
            async for progress in self._progress():
                yield progress
            for i, delta in enumerate(deltas):
                if i == 2 and "drop" in self.message:
                    while not self.stage.may_drop:
                        await asyncio.sleep(0.005)
                    raise ConnectionResetError
                if i == 2 and "short" in self.message:
                    return
                if i == 2 and "break" in self.message:
                    error = {"message": "The engine was restarted.", "code": "engine_restarting"}
                    yield f"data: {json.dumps({'error': error})}\n\n".encode()
                    return
                yield self._chunk(delta, i + 1, None)
                await asyncio.sleep(SLOW_SECONDS if is_slow else 0.002)
        except asyncio.CancelledError:
            self.stage.num_cancelled += 1
            raise
        finish = "tool_calls" if "tool_calls" in deltas[-1] else "stop"
        yield self._chunk({}, len(deltas), "length" if "cut" in self.message else finish)
        yield b"data: [DONE]\n\n"


async def _chat(request: Request) -> Response:
    stage: Stage = request.app.state.stage
    if denied := _denied(request):
        return denied
    body = await request.json()
    stage.bodies.append(body)
    message = _question(body)
    if "busy" in message:
        words = "The queue is full."
        return _error(429, "rate_limit_error", "queue_full", words, **{"Retry-After": "7"})
    if "restart" in message:
        return _error(503, "overloaded_error", "engine_restarting", "The engine restarts.")
    if "refuse" in message:
        return _error(400, "invalid_request_error", "context_length_exceeded", "Too long <b>.")
    stream = _Answer(stage, body).stream()
    if "bytes" in message:
        stream = _single_bytes(stream)
    return StreamingResponse(stream, media_type="text/event-stream")


async def _score(request: Request) -> Response:
    """Items by the number of their letters; the query picks what goes wrong."""
    stage: Stage = request.app.state.stage
    if denied := _denied(request):
        return denied
    body = await request.json()
    stage.bodies.append(body)
    query = body["query"]
    if "slow" in query:
        await asyncio.sleep(30)
    if "refuse" in query:
        return _error(400, "invalid_request_error", "context_length_exceeded", "Too <b>long</b>.")
    if "busy" in query:
        return _error(429, "rate_limit_error", "queue_full", "The queue is full.")
    return JSONResponse(_scores(body, is_partly="partly" in query))


def _scores(body: dict[str, Any], *, is_partly: bool) -> dict[str, Any]:
    """The answer of either route; partly: the shortest, or the first, has no score."""
    texts = body["items"] if "labels" in body else body["documents"]
    shares = [min(1.0, len(text) / 40) for text in texts]
    order = sorted(range(len(shares)), key=lambda i: -shares[i])
    left_out = [] if not is_partly else order[-1:]
    errors = [{"index": i, "message": "It is too long."} for i in left_out]
    if "labels" in body:
        rows = [[None, None] if i in left_out else [x, 1 - x] for i, x in enumerate(shares)]
        return {"scores": rows, "errors": errors}
    results = [{"index": i, "relevance_score": shares[i]} for i in order if i not in left_out]
    return {"results": results, "errors": errors}


async def _single_bytes(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The stream with the other line ends, cut between all bytes, also those of one character."""
    async for piece in stream:
        for byte in piece.replace(b"\n", b"\r\n"):
            yield bytes([byte])


def _denied(request: Request) -> Response | None:
    key = request.app.state.stage.key
    if key is None or request.headers.get("Authorization") == f"Bearer {key}":
        return None
    return _error(401, "authentication_error", "invalid_api_key", "Wrong key.")


async def _models(request: Request) -> Response:
    cards = request.app.state.stage.cards
    return _denied(request) or JSONResponse({"object": "list", "data": cards})


async def _ready(request: Request) -> Response:
    stage: Stage = request.app.state.stage
    body = {"status": stage.status, "progress": stage.progress}
    return JSONResponse(body, 200 if stage.status == "ready" else 503)


async def _index(request: Request) -> Response:
    return _file_named(request, "index.html")


async def _icon(request: Request) -> Response:
    return _file_named(request, "favicon.svg")


async def _file(request: Request) -> Response:
    return _file_named(request, request.path_params["name"])


def _file_named(request: Request, name: str) -> Response:
    content = request.app.state.files.get(name)
    if content is None:
        return Response(status_code=404)
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
    return Response(content, media_type=MEDIA_TYPES[Path(name).suffix], headers=headers)


def make_app(stage: Stage) -> Starlette:
    """The stand-in as an ASGI application."""
    app = Starlette(
        routes=[
            Route("/", _index),
            Route("/favicon.ico", _icon),
            Route("/ui/{name:path}", _file),
            Route("/ready", _ready),
            Route("/v1/models", _models),
            Route("/v1/chat/completions", _chat, methods=["POST"]),
            Route("/v1/score", _score, methods=["POST"]),
            Route("/v1/rerank", _score, methods=["POST"]),
        ]
    )
    app.state.stage = stage
    paths = [path for path in WEB.rglob("*") if path.is_file()]
    app.state.files = {str(path.relative_to(WEB)): path.read_bytes() for path in paths}
    return app


@contextmanager
def running_server(stage: Stage, port: int = 0) -> Iterator[Stage]:
    """Serve on the loopback interface, on a free port if none is given, until the block ends."""
    app = make_app(stage)
    config = uvicorn.Config(app, port=port, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the stand-in did not start"
            time.sleep(0.01)
        chosen = server.servers[0].sockets[0].getsockname()[1]
        stage.base = f"http://127.0.0.1:{chosen}"
        yield stage
    finally:
        server.should_exit = True
        thread.join()
