"""An engine that answers from a script, for fast tests of the HTTP process.

    client = FakeClient()                       # answers every prompt with " the end" and EOS
    client.answer_with("some text")             # the same text for every request
    client.script = lambda request: [...]       # or steps: TokenUpdate, float (seconds), exception,
                                                # Computed (tokens of the prompt so far)
    app = fake_app(client)                      # the whole application, ready to serve
    async with running(app): ...                # its lifespan, then httpx.ASGITransport(app)

Updates travel through the real `TokenStream`, so a reader sees what it sees with a real engine. The
tokenizer is the one of tests/data/gguf/llama-tiny.gguf with a chat template added.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import perf_counter

import httpx
import numpy as np

from tiercel.errors import EngineDeadError, QueueFullError
from tiercel.ipc.messages import EngineInfo, EngineStats
from tiercel.ipc.streams import TokenStream, stop
from tiercel.ipc.supervisor import EngineState
from tiercel.ipc.tokenizer_wire import pack_tokenizer, unpack_tokenizer
from tiercel.models.source import open_source
from tiercel.request.request import ABORTED, TokenLogprobs, TokenUpdate
from tiercel.serve.app import create_app
from tiercel.serve.http.metrics import Metrics
from tiercel.serve.settings import ServeSettings
from tiercel.serve.state import ServerState
from tiercel.text.template_client import TemplateWorkers

MODEL_FILE = Path(__file__).parents[1] / "data/gguf/llama-tiny.gguf"
NAME = "tiny"
SCORED = TokenUpdate((), (), "length", None)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] "
    "{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@cache
def _packed():
    return pack_tokenizer(open_source(MODEL_FILE))


@cache
def fake_tokenizer():
    return unpack_tokenizer(_packed())


def fake_info(**changes):
    fields = {
        "model_name": "llama-tiny.gguf",
        "architecture": "llama",
        "file_format": "gguf",
        "vocab_size": fake_tokenizer().vocab_size,
        "hidden_size": 64,
        "max_position": 512,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "block_size": 16,
        "num_blocks": 129,
        "device": "cpu",
        "dtype": "float32",
        "seed": 0,
        "spec": "off",
        "num_spec_tokens": 0,
        "has_prefix_cache": True,
        "gpu_memory_utilization": 0.9,
        "tokenizer": _packed(),
        "chat_template": CHAT_TEMPLATE,
        "pooling": None,
        "load_seconds": 0.1,
    }
    return EngineInfo(**{**fields, **changes})


@dataclass(frozen=True)
class Computed:
    """A step of a script: so many tokens of the prompt are computed."""

    num_tokens: int


@dataclass
class FakeClient:
    """Stands for `EngineClient`; the lists record what was asked of it."""

    info: EngineInfo | None = field(default_factory=fake_info)
    state: EngineState = EngineState.READY
    progress: float = 1.0
    stats: EngineStats = field(default_factory=EngineStats)
    num_restarts: int = 0
    failure: str | None = None
    max_waiting: int = 512
    submitted: list = field(default_factory=list)
    aborted: list = field(default_factory=list)
    stopped: list = field(default_factory=list)
    num_forgets: int = 0
    script = None

    def __post_init__(self):
        self._tasks = {}
        self._streams = {}
        self._ready = asyncio.Event()
        self._ended = asyncio.Event()
        self.on_stats = None
        self.answer_with(" the end")

    def answer_with(self, text, *, delay_s=0.0):
        """Every request gets these words, token by token, then EOS."""
        tokenizer = fake_tokenizer()
        ids = [*tokenizer.encode(text), tokenizer.eos_id]

        def script(request):
            steps = []
            for place, token_id in enumerate(ids, 1):
                reason = "stop" if place == len(ids) else None
                if place == request.max_tokens and reason is None:
                    reason = "length"
                steps += [delay_s, TokenUpdate((token_id,), (), reason, None)]
                if reason is not None:
                    return steps
            return steps

        self.script = script

    @staticmethod
    def values_of(request):
        """Of a request to score: minus the wanted token's id and a 16th of the tokens before."""
        task = request.score
        values = []
        for number, item in enumerate(task.items or ((),)):
            length = (len(request.prompt_token_ids) + len(item)) / 16
            for read in task.reads[number % len(task.reads)]:
                values += [-token_id - length for token_id in read.token_ids]
        return np.array(values, np.float32)

    @property
    def final_error(self):
        error = EngineDeadError("the engine is dead: m.gguf changed since the start.")
        error.code, error.retry_after_s, error.is_final = "engine_dead", None, True
        return error

    @property
    def num_running(self):
        return len(self._streams)

    @property
    def num_waiting(self):
        return 0

    @property
    def pid(self):
        return None

    @property
    def replicas(self):
        return (self,)

    async def start(self):
        pass

    async def wait_ready(self):
        while self.state is not EngineState.READY:
            await asyncio.sleep(0.01)
        return self.info

    async def wait_ended(self):
        await self._ended.wait()

    def check_room(self, count=1):
        if self.state is not EngineState.READY:
            raise EngineDeadError(f"the engine is {self.state.value}.")
        if len(self._streams) + count > self.max_waiting:
            error = QueueFullError("too many requests wait.")
            error.retry_after_s = 7
            raise error

    def submit(self, request):
        self.check_room()
        self.submitted.append(request)
        stream = TokenStream(request, perf_counter())
        stream.enter(perf_counter(), 0)
        if request.score is not None and request.score.sample_keys is not None:
            entry = TokenLogprobs(97, -0.5, ((97, -0.5), (98, -1.5)))
            stream.set_item_tokens([entry] * request.num_items)
        elif request.score is not None:
            stream.set_scores(self.values_of(request))
        self._streams[id(request)] = stream
        self._tasks[id(request)] = asyncio.create_task(self._play(request, stream))
        return stream

    def abort(self, request):
        stream = self._end(request)
        if stream is not None:
            self.aborted.append(request)
            stream.push(ABORTED)

    def stop(self, request, stop_string):
        stop(request, stop_string)
        if self._end(request) is not None:
            self.stopped.append((request, stop_string))

    async def forget(self):
        assert not self._streams, "nothing is under way"
        self.num_forgets += 1

    async def close(self, drain_seconds=0.0):
        deadline = perf_counter() + drain_seconds
        while self._streams and perf_counter() < deadline:
            await asyncio.sleep(0.01)
        for stream in list(self._streams.values()):
            self.abort(stream.request)
        self._ended.set()

    def die(self, error=None):
        """The engine process is gone: every stream ends with an error."""
        self.state = EngineState.RESTARTING
        for stream in list(self._streams.values()):
            self._end(stream.request)
            stream.push(error or EngineDeadError("the engine ended under this request."))

    async def _play(self, request, stream):
        steps = [SCORED] if request.score is not None else self.script(request)
        for step in steps:
            if isinstance(step, int | float):
                await asyncio.sleep(step)
                continue
            if isinstance(step, Computed):
                stream.advance(step.num_tokens)
                continue
            if isinstance(step, BaseException):
                self._streams.pop(id(request), None)
                stream.push(step)
                return
            if step.finish_reason is not None:
                self._streams.pop(id(request), None)
            stream.push(step)

    def _end(self, request):
        task = self._tasks.pop(id(request), None)
        if task is not None:
            task.cancel()
        return self._streams.pop(id(request), None)


@cache
def _shared_workers():
    """Template processes that outlive an application: starting one takes 0.2 s."""
    workers = TemplateWorkers(2)
    workers.close = lambda: None
    return workers


def fake_state(client=None, *, has_own_workers=False, **settings):
    """The state of a server around a fake engine; `settings` are fields of `ServeSettings`."""
    merged = ServeSettings(**{"served_names": (NAME,), **settings})
    return ServerState(
        merged,
        client or FakeClient(),
        Metrics(merged.metrics_prefix),
        template_workers=TemplateWorkers(2) if has_own_workers else _shared_workers(),
    )


def fake_app(client=None, **settings):
    return create_app(fake_state(client, **settings))


@contextlib.asynccontextmanager
async def running(app, *, is_ready=True):
    """Run the application's lifespan; yields an HTTP client that speaks to it without a socket."""
    async with app.router.lifespan_context(app):
        while is_ready and app.state.server.model is None:
            if app.state.server.failure is not None:
                raise app.state.server.failure
            await asyncio.sleep(0.005)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            yield http


def ask(*calls, client=None, **settings):
    """Send requests to a fake application one after the other; returns the responses.

    A call is (method, path) or (method, path, options of httpx).
    """

    async def send():
        async with running(fake_app(client, **settings)) as http:
            return [
                await http.request(method, path, **(options[0] if options else {}))
                for method, path, *options in calls
            ]

    return asyncio.run(send())
