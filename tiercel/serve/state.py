"""State that the routes share: the settings, the engine's client, the model once it is loaded.

There is one `ServerState` per application, made by the command (or by a test) and passed to every
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

from tiercel.errors import EngineDeadError
from tiercel.ipc.client import EngineClient
from tiercel.ipc.replicas import Replicas
from tiercel.ipc.supervisor import EngineState
from tiercel.serve.http.access import KEY_DIGEST
from tiercel.serve.http.errors import overload_error
from tiercel.serve.http.metrics import Metrics
from tiercel.serve.served_model import ServedModel
from tiercel.serve.settings import ServeSettings
from tiercel.serve.startup_progress import StartupProgress
from tiercel.text.template_client import TemplateWorkers

if TYPE_CHECKING:
    from tiercel.serve.http.tracing import Tracing  # OpenTelemetry is an extra

P = ParamSpec("P")
T = TypeVar("T")
NUM_THREADS: Final = 8  # tokenizing, large bodies; templates and grammars have their own processes
NUM_TEMPLATE_WORKERS: Final = 2


@dataclass(frozen=True, slots=True)
class Sender:
    """Origin of a request.

    Attributes:
        request_id: id of the HTTP request, for the log.
        client: digest of its API key if keys are needed, else the address of its connection.
    """

    request_id: str = ""
    client: str = ""


@dataclass(slots=True)
class ServerState:
    """State that the routes share.

    Attributes:
        settings: settings of the server.
        client: client of the engine process, or of several.
        metrics: metrics of this application.
        model: the served model; None until the engine is ready for the first time.
        is_draining: whether the server shuts down and accepts no new requests.
        startup: progress of the first start.
        is_over: whether the engine has ended for good, or the model could not be loaded.
        failure: error that ended the engine monitor; None while it runs, and after a normal end.
        tracing: sender of spans to a collector; None if tracing is off.
        pool: threads for work that would block the event loop.
        template_workers: processes that render chat templates.
        template_semaphore: semaphore with one permit per template process.
    """

    settings: ServeSettings
    client: EngineClient | Replicas
    metrics: Metrics
    model: ServedModel | None = None
    is_draining: bool = False
    startup: StartupProgress = field(default_factory=StartupProgress)
    is_over: bool = False
    failure: Exception | None = None
    tracing: Tracing | None = None
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(NUM_THREADS, "tiercel-serve")
    )
    template_workers: TemplateWorkers = field(
        default_factory=lambda: TemplateWorkers(NUM_TEMPLATE_WORKERS)
    )
    template_semaphore: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(NUM_TEMPLATE_WORKERS)
    )

    @property
    def progress(self) -> float:
        """How far the start has come, 0 to 1; it never falls while the engine lives."""
        share = self.client.progress
        return self.startup.progress(share) if self.model is None else share

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
            raise overload_error("draining", "The server is shutting down.", 1)
        if self.model is None:
            error = EngineDeadError("The model is still loading.", hint="Ask /ready.")
            error.code = "engine_loading"
            error.retry_after_s = 5
            raise error
        return self.model

    async def run_in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a long computation in a thread."""
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self.pool, call)

    def close(self) -> None:
        """End threads and processes."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.template_workers.close()
        if self.model is not None and self.model.grammars is not None:
            self.model.grammars.close()


def server_state(request: Request) -> ServerState:
    """The state of the application that a request arrived at."""
    state: ServerState = request.app.state.server
    return state


def request_id(request: Request) -> str:
    """The id in the response header `x-request-id`."""
    identifier: str = request.scope["tiercel.request_id"]
    return identifier


def sender_of(request: Request) -> Sender:
    """The origin of a request, for fair queues."""
    peer = "" if request.client is None else request.client.host
    return Sender(request_id(request), request.scope.get(KEY_DIGEST, peer))
