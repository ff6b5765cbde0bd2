"""Routes for probes and clients: health, readiness, version, metrics, models, props."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from tiercel.ipc.supervisor import EngineState
from tiercel.serve.http.errors import JSON_TYPE, client_error
from tiercel.serve.http.metrics import CONTENT_TYPE, EngineGauges
from tiercel.serve.http.route_docs import RouteDoc
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import ServerState
from tiercel.version import __version__

_RETRY_SECONDS: Final = {"loading": "5", "restarting": "2", "draining": "5", "dead": "60"}
# Parts of OpenAI's API that are not supported, and the error message.
_NOT_SUPPORTED: Final = {
    "audio": "This server has no audio models.",
    "images": "This server does not generate images.",
    "files": "This server keeps no files.",
    "batches": "This server has no batch jobs: send the requests one by one.",
    "fine_tuning": "This server does not train models.",
}


class Health(Struct, frozen=True):
    """The server is alive."""

    status: Literal["ok"] = "ok"


class Ready(Struct, frozen=True, omit_defaults=True):
    """Whether requests are accepted.

    `progress` of the start, 0 to 1, only rises; `reason` is set if the engine is dead. Of several
    engines `engines_ready` is the number of those that accept requests.
    """

    status: Literal["ready", "loading", "restarting", "draining", "dead"]
    progress: float | None = None
    reason: str | None = None
    engines_ready: int | None = None


class Version(Struct, frozen=True):
    """The version of the server."""

    version: str


class DefaultsCard(Struct, frozen=True, omit_defaults=True):
    """Sampling defaults of a model that differ from the API's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ModelCard(Struct, frozen=True):
    """A served model; each alias has a card."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "tiercel"
    parent: None = None
    sampling_defaults: DefaultsCard | UnsetType = UNSET


class ModelList(Struct, frozen=True):
    """All names that `model` may hold."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class GenerationSettings(Struct, frozen=True):
    """Part of `Props`."""

    n_ctx: int


class Modalities(Struct, frozen=True):
    """Part of `Props`."""

    vision: bool = False
    audio: bool = False


class Props(Struct, frozen=True):
    """The server as llama-server describes itself."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    chat_template: str
    build_info: str
    bos_token: str
    eos_token: str
    modalities: Modalities = Modalities()


DOCS: Final = (
    RouteDoc("/health", "Whether the process answers.", answer=Health, errors=(503,)),
    RouteDoc("/ready", "Whether requests are accepted.", answer=Ready, errors=(503,),
             answer_503=Ready),
    RouteDoc("/version", "The version of the server.", answer=Version),
    RouteDoc("/metrics", "Metrics in Prometheus' text format.", media_type="text/plain"),
    RouteDoc("/props", "The server and its model, in llama-server's form.", answer=Props,
             errors=(503,)),
    RouteDoc("/v1/models", "The names that `model` may hold.", answer=ModelList,
             aliases=("/models",), errors=(503,)),
    RouteDoc("/v1/models/{id}", "One of them.", answer=ModelCard, errors=(404, 503)),
)  # fmt: skip


def routes(state: ServerState) -> list[BaseRoute]:
    """The routes of this module."""
    probes = [_health(state), _ready(state), _version(), _metrics(state)]
    return [*probes, *_model_routes(state), *_not_supported()]


def json_response(value: object, status_code: int = 200) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(value), status_code, media_type=JSON_TYPE)


def _health(state: ServerState) -> Route:
    async def health(_request: Request) -> Response:
        if state.client.state is EngineState.DEAD:
            raise state.client.final_error
        return json_response(Health())

    return Route("/health", health)


def _ready(state: ServerState) -> Route:
    async def ready(_request: Request) -> Response:
        status = _ready_status(state)
        engines = [client.state is EngineState.READY for client in state.client.replicas]
        num_ready = None if len(engines) == 1 else sum(engines)
        if status == "ready":
            return json_response(Ready("ready", engines_ready=num_ready))
        reason = str(state.client.final_error) if status == "dead" else None
        answer = json_response(Ready(status, round(state.progress, 3), reason, num_ready), 503)
        answer.headers["retry-after"] = _RETRY_SECONDS[status]
        return answer

    return Route("/ready", ready)


def _ready_status(
    state: ServerState,
) -> Literal["ready", "loading", "restarting", "draining", "dead"]:
    engine = state.client.state
    if engine is EngineState.DEAD:
        return "dead"
    if state.is_draining or engine is EngineState.DRAINING:
        return "draining"
    if state.model is None:
        return "loading"
    return "ready" if engine is EngineState.READY else "restarting"


def _version() -> Route:
    async def version(_request: Request) -> Response:
        return json_response(Version(__version__))

    return Route("/version", version)


def _metrics(state: ServerState) -> Route:
    async def metrics(_request: Request) -> Response:
        engines = [
            EngineGauges(
                client.num_running,
                client.num_waiting,
                client.num_restarts,
                client.state is EngineState.READY,
            )
            for client in state.client.replicas
        ]
        text = state.metrics.render(engines, state.template_workers.num_kills)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    return Route("/metrics", metrics)


def _model_routes(state: ServerState) -> list[BaseRoute]:
    async def models(_request: Request) -> Response:
        model = state.ready_model()
        return json_response(ModelList([_card(model, name) for name in model.names]))

    async def one_model(request: Request) -> Response:
        model = state.ready_model()
        name = request.path_params["id"]
        model.check_name(name)
        return json_response(_card(model, name))

    async def props(_request: Request) -> Response:
        model = state.ready_model()
        tokenizer, info = model.tokenizer, model.info
        return json_response(
            Props(
                default_generation_settings=GenerationSettings(info.max_model_len),
                total_slots=model.num_rows,
                model_alias=model.name,
                chat_template=info.chat_template or "",
                build_info=f"tiercel {__version__}",
                bos_token=token_name(model, tokenizer.bos_id) or "",
                eos_token=token_name(model, tokenizer.eos_id) or "",
            )
        )

    return [
        Route("/v1/models", models),
        Route("/models", models),
        Route("/v1/models/{id:path}", one_model),
        Route("/props", props),
    ]


def _card(model: ServedModel, name: str) -> ModelCard:
    defaults = model.sampling
    sampling = DefaultsCard(
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
    )
    return ModelCard(
        name,
        model.created,
        model.name,
        model.info.max_model_len,
        sampling_defaults=UNSET if sampling == DefaultsCard() else sampling,
    )


def token_name(model: ServedModel, token_id: int | None) -> str | None:
    """The text of a special token, or None if the model lacks it."""
    if token_id is None:
        return None
    return model.tokenizer.token_text(token_id).encode("utf-8", "replace").decode()


def _not_supported() -> list[BaseRoute]:
    routes: list[BaseRoute] = []
    for name, why in _NOT_SUPPORTED.items():
        endpoint = _Refusal(why)
        routes.append(Route(f"/v1/{name}", endpoint))
        routes.append(Route(f"/v1/{name}/{{rest:path}}", endpoint))
    return routes


class _Refusal:
    """An endpoint for every method that responds with 404 and the reason."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def __call__(self, _scope: Scope, _receive: Receive, _send: Send) -> None:
        raise client_error(404, "not_supported", self._why)
