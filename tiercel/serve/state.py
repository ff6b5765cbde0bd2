"""What the routes share: settings that do not change, the engine's client, the model once it is up.

There is one `ServerState` per application, made by the command (or by a test) and handed to every
route module's `routes(state)`; nothing here is global.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from starlette.requests import Request

from tiercel.errors import EngineDeadError, ModelNotFoundError
from tiercel.ipc.supervisor import EngineState
from tiercel.params import LIMITS, Limits, SamplingDefaults
from tiercel.request.inputs import InputProcessor
from tiercel.serve.http.errors import escaped, overloaded
from tiercel.text.chat_template import ChatTemplate
from tiercel.text.template_client import TemplateWorkers
from tiercel.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tiercel.ipc.client import EngineClient
    from tiercel.ipc.messages import EngineInfo
    from tiercel.serve.generation.grammar_check import GrammarChecker
    from tiercel.serve.http.metrics import Metrics
    from tiercel.serve.http.tracing import Tracing
    from tiercel.serve.lifecycle.model_watch import ModelWatch

P = ParamSpec("P")
T = TypeVar("T")
NUM_THREADS: Final = 8  # tokenizing, big bodies; templates and grammars wait on their own processes
NUM_TEMPLATE_WORKERS: Final = 2
KEY_DIGEST: Final = "tiercel.key_digest"  # of the scope: hex, where a key was needed and right


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Who may ask.

    Attributes:
        key_digests: SHA-256 of every accepted key; empty: no key is asked for.
        allowed_hosts: names that `Host` may hold, lower case without port; None: any.
        cors_origins: origins that browsers may send from; ``*`` is any.
        is_metrics_open: whether `/metrics` needs no key.
    """

    key_digests: tuple[bytes, ...] = ()
    allowed_hosts: frozenset[str] | None = None
    cors_origins: tuple[str, ...] = ()
    is_metrics_open: bool = True


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """How the server was asked to be.

    Attributes:
        served_names: names that `model` may hold; answers carry the first. Empty: the model's own.
        limits: bounds of every route.
        access: keys, hosts, origins.
        sampling: defaults of requests; they win over those of the model's file.
        has_model_defaults: the model's file may set defaults of requests.
        tool_parser: name, ``none``, or None to choose by the model.
        reasoning_parser: the same.
        is_reasoning_mirrored: reasoning goes to `reasoning` besides `reasoning_content`.
        has_priority_field: requests may set `priority`.
        is_strict: unknown fields are refused instead of counted.
        trusts_templates: requests may bring a `chat_template`.
        parse_special: the text of a control token in a raw prompt becomes its id.
        has_ui: the web page is served.
        logs_prompts: prompts and answers go to the log.
        has_warm_workers: the processes that check grammars start before the server is ready; else
            with the first grammar.
        is_rehearsed: requests pass through the server before it is ready (`rehearsal.py`).
        slow_client_seconds: a reader that takes nothing for so long is given up.
        metrics_prefix: first part of every metric's name.
        url: where the server is reached, for messages; "" in tests.
    """

    served_names: tuple[str, ...] = ()
    limits: Limits = LIMITS
    access: AccessSettings = AccessSettings()
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    has_model_defaults: bool = True
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    is_reasoning_mirrored: bool = False
    has_priority_field: bool = False
    is_strict: bool = False
    trusts_templates: bool = False
    parse_special: bool = True
    has_ui: bool = True
    logs_prompts: bool = False
    has_warm_workers: bool = False
    is_rehearsed: bool = False
    slow_client_seconds: float = 60.0
    metrics_prefix: str = "tiercel"
    url: str = ""


@dataclass(frozen=True, slots=True)
class Sender:
    """Where a request comes from.

    Attributes:
        request_id: of the HTTP request, for the log.
        client: the digest of its key where keys are needed, else the address of its connection.
    """

    request_id: str = ""
    client: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The loaded model as the HTTP process knows it; kept while the engine restarts.

    Attributes:
        names: names that requests may use; answers carry the first.
        info: what the engine said of it.
        tokenizer: the model's.
        template: None where the model has none.
        inputs: makes requests for it.
        grammars: finds out whether a form can be enforced; None: none can, the model has no token
            that ends an answer.
        sampling: defaults of requests, by the server's options and the model's file.
        created: Unix seconds at which it was first ready.
    """

    names: tuple[str, ...]
    info: EngineInfo
    tokenizer: Tokenizer
    template: ChatTemplate | None
    inputs: InputProcessor
    grammars: GrammarChecker | None
    sampling: SamplingDefaults
    created: int

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.names[0]

    def check_name(self, name: str) -> None:
        """Compare the `model` field of a request; it is never more than a name.

        Raises:
            ModelNotFoundError: 404, another model.
        """
        if name not in self.names:
            raise ModelNotFoundError(
                f"the model '{escaped(name, 100)}' does not exist.",
                hint=f"This server has: {', '.join(self.names)}.",
            )


@dataclass(slots=True)
class ServerState:
    """Everything that the routes share.

    Attributes:
        settings: as asked for.
        client: speaks with the engine process.
        metrics: counters of this application.
        model: None until the engine was ready for the first time.
        is_draining: the server is going down and takes nothing new.
        watch: follows the engine, while the application runs.
        tracing: sends spans to a collector; None where nobody asked for it.
        show_status: rewrites the last line of a terminal, which says how a start goes on; None
            where there is no terminal.
        pool: threads for what would hold up the event loop.
        template_workers: the processes that render templates.
        template_slots: as many as there are template processes.
    """

    settings: ServeSettings
    client: EngineClient
    metrics: Metrics
    model: ServedModel | None = None
    is_draining: bool = False
    watch: ModelWatch | None = None
    tracing: Tracing | None = None
    show_status: Callable[[str], None] | None = None
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(NUM_THREADS, "tiercel-serve")
    )
    template_workers: TemplateWorkers = field(
        default_factory=lambda: TemplateWorkers(NUM_TEMPLATE_WORKERS)
    )
    template_slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(NUM_TEMPLATE_WORKERS)
    )

    def ready_model(self) -> ServedModel:
        """The model, for a route that needs it; the engine may still be restarting.

        Raises:
            EngineDeadError: 503, the first start is not done, or the server ends because its engine
                is dead.
            QueueFullError: 503 `draining`.
        """
        if self.is_draining and self.client.state is EngineState.DEAD:
            raise self.client.final_error
        if self.is_draining:
            raise overloaded("draining", "The server is shutting down.", 1)
        if self.model is None:
            error = EngineDeadError("The model is still loading.", hint="Ask /ready.")
            error.code = "engine_loading"
            error.retry_after_s = 5
            raise error
        return self.model

    async def off_loop(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that computes for long in a thread."""
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self.pool, call)

    def close(self) -> None:
        """Give threads and processes back."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.template_workers.close()
        if self.model is not None and self.model.grammars is not None:
            self.model.grammars.close()


def server_state(request: Request) -> ServerState:
    """The state of the application that a request arrived at."""
    state: ServerState = request.app.state.server
    return state


def request_id(request: Request) -> str:
    """The id that the answer's `x-request-id` carries."""
    identifier: str = request.scope["tiercel.request_id"]
    return identifier


def sender_of(request: Request) -> Sender:
    """Where a request comes from, to be fair to others."""
    peer = "" if request.client is None else request.client.host
    return Sender(request_id(request), request.scope.get(KEY_DIGEST, peer))
