"""`/v1/score`: how likely labels are behind each of many items, as SGLang's route has it."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import UNSET, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tiercel.engine.score_inputs import ScoreOutput, ScoreUsage
from tiercel.engine.score_params import ScoreParams
from tiercel.serve.body import TokenId, read_body
from tiercel.serve.info_routes import json_response
from tiercel.serve.logs import request_log
from tiercel.serve.respond import while_connected
from tiercel.serve.route_docs import RouteDoc
from tiercel.serve.scoring import make_job, run_job
from tiercel.serve.state import ServedModel, ServerState

PATH: Final = "/v1/score"
ALIAS: Final = "/score"


class ScoreRequest(Struct, kw_only=True):
    """A query, items of its kind (texts or token ids), and labels as texts or as ids."""

    model: str
    query: str | list[TokenId]
    items: str | list[str | list[TokenId]]
    labels: list[str] | None = None
    label_token_ids: list[TokenId] | None = None
    apply_softmax: bool = False
    item_first: bool = False
    suffix: str | list[TokenId] = ""
    return_logprobs: bool = False
    label_normalization: Literal["sum", "mean"] = "sum"
    strict_labels: bool = False
    user: object = UNSET


class CachedTokens(Struct, frozen=True):
    """Of the prompt's tokens, those found in the prefix cache."""

    cached_tokens: int


class ScoreTokens(Struct, frozen=True):
    """Tokens of the query, once, and of all items."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens: int = 0

    @staticmethod
    def of(usage: ScoreUsage) -> ScoreTokens:
        """The usage of a call."""
        tokens, cached = usage.prompt_tokens, usage.cached_tokens
        return ScoreTokens(tokens, tokens, CachedTokens(cached))


class ScoreAnswer(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Probabilities, and log-probabilities where asked for: a row per item, a column per label."""

    model: str
    scores: list[list[float]]
    usage: ScoreTokens
    logprobs: list[list[float]] | None = None
    object: Literal["scoring", ""] = ""


DOCS: Final = (
    RouteDoc(
        PATH,
        "Probabilities of labels behind each item.",
        ScoreRequest,
        ScoreAnswer,
        "post",
        aliases=(ALIAS,),
        errors=(404, 429, 503),
    ),
)


def routes(state: ServerState) -> list[BaseRoute]:
    """The routes of this module."""

    async def create(request: Request) -> Response:
        model = state.ready_model()
        body = await read_body(request, ScoreRequest, state.settings.limits)
        return await while_connected(request, _answer(state, model, request, body))

    return [Route(path, create, methods=["POST"]) for path in (PATH, ALIAS)]


async def _answer(
    state: ServerState, model: ServedModel, request: Request, body: ScoreRequest
) -> Response:
    model.check_name(body.model)
    params = ScoreParams(
        labels=body.labels,
        label_token_ids=body.label_token_ids,
        suffix=body.suffix,
        normalize="labels" if body.apply_softmax else "vocab",
        item_first=body.item_first,
        label_normalization=body.label_normalization,
        strict_labels=body.strict_labels,
    )
    job = await make_job(state, model, body.query, body.items, params)
    output: ScoreOutput = await run_job(state, job, request_log(request))
    answer = ScoreAnswer(
        object="scoring",
        model=model.name,
        scores=output.probs.tolist(),
        logprobs=output.logprobs.tolist() if body.return_logprobs else None,
        usage=ScoreTokens.of(output.usage),
    )
    return json_response(answer)
