"""A scripted OpenAI-compatible server with known delays."""

import asyncio
import json
import time

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


class StandIn:
    """Completions with `max_tokens` tokens, `piece_tokens` in each piece.

    A prompt that is the name of a fault causes it: `429`, `503`, `drop`, `garbage`, `no_choices`,
    `error_event`, `no_done`, `no_usage`, `silence`, `silence_inside`.

    Attributes:
        bodies: bodies of all completion requests, in order.
        at_s: arrival times of the requests.
        first_s, gap_s: delays before the first piece, and between pieces.
        takes_ids: whether prompts of token ids are accepted.
        words_per: tokens = words_per[0] + words_per[1] * words.
        extra_tokens: tokens counted in each prompt of ids besides the ids.
        missing_tokens: number by which each answer is shorter than requested.
        cached: reported cached tokens.
        refuse_from: number of the first request that gets a 503.
        crowd: number of requests that must be under way together once before any but the first,
            which probes, is answered.
        running, most_running: concurrent requests, and their maximum.
    """

    def __init__(self):
        self.bodies = []
        self.at_s = []
        self.first_s = 0.0
        self.gap_s = 0.0
        self.piece_tokens = 1
        self.takes_ids = True
        self.words_per = (1, 2)
        self.cached = None
        self.refuse_from = None
        self.crowd = 0
        self.extra_tokens = self.missing_tokens = 0
        self.running = self.most_running = 0
        self.models = [{"id": "stand-in", "owned_by": "nobody", "max_model_len": 99}, {"id": "b"}]
        self._app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/version", self._version),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    async def __call__(self, scope, receive, send):
        await self._app(scope, receive, send)

    async def _models(self, request):
        if request.headers.get("authorization") == "Bearer wrong":
            return JSONResponse({"error": {"message": "no"}}, 401)
        return JSONResponse({"object": "list", "data": self.models})

    async def _version(self, _request):
        return JSONResponse({"version": "1.5"})

    async def _complete(self, request):
        self.at_s.append(time.perf_counter())
        body = await request.json()
        self.bodies.append(body)
        prompt = body["prompt"]
        if isinstance(prompt, list) and not self.takes_ids:
            return JSONResponse({"error": {"message": "prompt must be a string"}}, 400)
        if self.refuse_from is not None and len(self.bodies) >= self.refuse_from:
            prompt = "503"
        if prompt in ("429", "503"):
            return JSONResponse({"error": {"message": f"{prompt} it is"}}, int(prompt))
        if prompt == "silence":
            await asyncio.sleep(60)
        if prompt == "drop":
            return Response(b"cut", headers={"content-length": "100"})
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body):
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            async for event in self._script(body["prompt"], body["max_tokens"]):
                payload = event if isinstance(event, str) else json.dumps(event)
                yield f"data: {payload}\n\n"
        finally:
            self.running -= 1

    async def _script(self, prompt, max_tokens):
        fault = prompt if isinstance(prompt, str) else ""
        while self.most_running < self.crowd and len(self.bodies) > 1:
            await asyncio.sleep(0.005)
        await asyncio.sleep(self.first_s)
        num_tokens = max(1, max_tokens - self.missing_tokens)
        left = num_tokens
        while left > 0 and fault != "no_choices":
            took = min(self.piece_tokens, left)
            left -= took
            reason = "length" if left == 0 else None
            yield {"choices": [{"index": 0, "text": " x" * took, "finish_reason": reason}]}
            if fault == "garbage":
                yield "{not json"
            if fault == "error_event":
                yield {"error": {"message": "the engine died", "code": "engine_restarting"}}
            if fault == "silence_inside":
                await asyncio.sleep(60)
            if left:
                await asyncio.sleep(self.gap_s)
        if fault != "no_usage":
            usage = {"prompt_tokens": self._count(prompt), "completion_tokens": num_tokens}
            if self.cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
            yield {"choices": [], "usage": usage}
        if fault != "no_done":
            yield "[DONE]"

    def _count(self, prompt):
        if isinstance(prompt, list):
            return len(prompt) + self.extra_tokens
        fixed, per_word = self.words_per
        return round(fixed + per_word * len(prompt.split()))
