"""`/v1/score`: probabilities of labels after each of many items, as in SGLang.

Its other form takes pairs of texts, as cross-encoders do, and returns how relevant the second text
is to the first; see `relevance_prompt.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from tiercel.errors import InvalidRequestError
from tiercel.request.request import Request as EngineRequest
from tiercel.request.score_inputs import PACKED, SEPARATE, ScoreJob, ScoreOutput, ScoreUsage
from tiercel.request.score_params import ScoreParams
from tiercel.serve.api.info_routes import json_response
from tiercel.serve.api.model_routes import model_routes
from tiercel.serve.api.scoring.relevance_prompt import make_relevance_job, make_relevance_prompt
from tiercel.serve.api.scoring.score_jobs import make_job, run_job
from tiercel.serve.http.body import TokenId
from tiercel.serve.http.logs import request_log
from tiercel.serve.http.route_docs import RouteDoc
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import ServerState

PATH: Final = "/v1/score"
ALIAS: Final = "/score"


class ScoreRequest(Struct, kw_only=True):
    """A query, items of its kind (texts or token ids), and labels as texts or as ids; or pairs."""

    model: str
    query: str | list[TokenId] | None = None
    items: str | list[str | list[TokenId]] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    labels: list[str] | None = None
    label_token_ids: list[TokenId] | None = None
    apply_softmax: bool = False
    item_first: bool = False
    suffix: str | list[TokenId] = ""
    return_logprobs: bool = False
    label_normalization: Literal["sum", "mean"] = "sum"
    strict_labels: bool = False
    long_items: Literal["refuse", "skip", "cut"] = "refuse"
    user: object = UNSET


class CachedTokens(Struct, frozen=True):
    """Prompt tokens found in the prefix cache."""

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


class PairScore(Struct, frozen=True):
    """How relevant the second text of a pair is to the first."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreError(Struct, frozen=True):
    """An item or a pair without a score."""

    index: int
    message: str


class ScoreAnswer(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Probabilities, and log-probabilities if requested: a row per item, a column per label.

    For pairs: `data` in their order. `errors` lists items or pairs without a score; the values of
    such an item are null.
    """

    model: str
    usage: ScoreTokens
    scores: list[list[float | None]] | None = None
    logprobs: list[list[float | None]] | None = None
    data: list[PairScore] | None = None
    errors: list[ScoreError] = []
    object: Literal["scoring", "list", ""] = ""


DOCS: Final = (
    RouteDoc(
        PATH,
        "Probabilities of labels after each item.",
        ScoreRequest,
        ScoreAnswer,
        "post",
        aliases=(ALIAS,),
        errors=(404, 429, 503),
    ),
)


def routes(state: ServerState) -> list[BaseRoute]:
    """The routes of this module."""
    return model_routes(state, (PATH, ALIAS), ScoreRequest, _answer)


async def _answer(
    state: ServerState, model: ServedModel, request: Request, body: ScoreRequest
) -> Response:
    model.check_name(body.model)
    if body.query is None and body.items is None:
        return await _answer_pairs(state, model, request, body)
    _refuse_pairs(body)
    if body.query is None or body.items is None:
        raise _missing("query" if body.query is None else "items")
    params = ScoreParams(
        labels=body.labels,
        label_token_ids=body.label_token_ids,
        suffix=body.suffix,
        normalize="labels" if body.apply_softmax else "vocab",
        item_first=body.item_first,
        label_normalization=body.label_normalization,
        strict_labels=body.strict_labels,
        long_items=body.long_items,
    )
    job = await make_job(state, model, body.query, body.items, params)
    output: ScoreOutput = await run_job(state, job, request_log(request))
    answer = ScoreAnswer(
        object="scoring",
        model=model.name,
        scores=_rows(output.probs),
        logprobs=_rows(output.logprobs) if body.return_logprobs else None,
        errors=[ScoreError(place, output.errors[place]) for place in sorted(output.errors)],
        usage=ScoreTokens.of(output.usage),
    )
    return json_response(answer)


def _rows(values: npt.NDArray[np.float32]) -> list[list[float | None]]:
    """JSON has no NaN."""
    return [[None if math.isnan(x) else x for x in row] for row in values.tolist()]


_PAIR_FIELDS: Final = (("text_1", "text_2"), ("queries", "documents"))


def _missing(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: this field must be given.", param=name)


def _refuse_pairs(body: ScoreRequest) -> None:
    for name in (name for pair in _PAIR_FIELDS for name in pair):
        if getattr(body, name) is not None:
            raise InvalidRequestError(
                f"{name} is given together with query and items.",
                hint="Send one form or the other.",
                param=name,
            )


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Pairs of texts, and the names of their fields."""

    fields: tuple[str, str]
    first: list[str]
    second: list[str]


def _read_pairs(body: ScoreRequest) -> _Pairs:
    """The pairs of a request: one first text for all second texts, or equally many of both.

    Raises:
        InvalidRequestError: naming the field.
    """
    given = [pair for pair in _PAIR_FIELDS if any(getattr(body, name) is not None for name in pair)]
    if not given:
        raise _missing("query")
    if len(given) > 1:
        raise InvalidRequestError("text_1 and queries are both given.", param="queries")
    (fields,) = given
    lists = []
    for name in fields:
        value: str | list[str] | None = getattr(body, name)
        if value is None:
            raise _missing(name)
        if not value and isinstance(value, list):
            raise InvalidRequestError(f"{name} is empty.", hint="Give at least one.", param=name)
        lists.append([value] if isinstance(value, str) else value)
    first, second = lists
    if len(first) not in (1, len(second)):
        raise InvalidRequestError(
            f"{fields[0]} holds {len(first)} texts and {fields[1]} {len(second)}.",
            hint="Give one of the former, or as many of both.",
            param=fields[0],
        )
    return _Pairs(fields, first * (len(second) if len(first) == 1 else 1), second)


@dataclass(frozen=True, slots=True)
class _PairJob:
    """Jobs of several queries that run as one."""

    jobs: list[ScoreJob]

    @property
    def requests(self) -> list[EngineRequest]:
        return [request for job in self.jobs for request in job.requests]

    @property
    def prompt_tokens(self) -> int:
        return sum(job.prompt_tokens for job in self.jobs)

    @property
    def num_items(self) -> int:
        return sum(job.num_items for job in self.jobs)

    def output(self) -> list[ScoreOutput]:
        return [job.output() for job in self.jobs]


async def _answer_pairs(
    state: ServerState, model: ServedModel, request: Request, body: ScoreRequest
) -> Response:
    pairs = _read_pairs(body)
    if len(pairs.second) > state.settings.limits.max_score_items:
        raise InvalidRequestError(
            f"{pairs.fields[1]} holds {len(pairs.second)} texts.",
            hint=f"Send at most {state.settings.limits.max_score_items}.",
            param=pairs.fields[1],
        )
    places: dict[str, list[int]] = {}
    for place, text in enumerate(pairs.first):
        places.setdefault(text, []).append(place)
    jobs = []
    for text, own in places.items():
        form = await make_relevance_prompt(state, model, text, None, pairs.fields[0])
        seconds = [pairs.second[place] for place in own]
        jobs.append(await make_relevance_job(state, model, form, seconds, None, pairs.fields[1]))
    outputs = await run_job(state, _PairJob(jobs), request_log(request))
    scores: dict[int, float] = {}
    errors: dict[int, str] = {}
    for own, output in zip(places.values(), outputs, strict=True):
        for line, place in enumerate(own):
            if line in output.errors:
                text = output.errors[line]
                errors[place] = text.replace(f"items[{line}]", f"{pairs.fields[1]}[{place}]")
            else:
                scores[place] = float(output.probs[line, 0])
    usages = [output.usage for output in outputs]
    usage = ScoreUsage(
        sum(own.prompt_tokens for own in usages),
        sum(own.cached_tokens for own in usages),
        SEPARATE if any(own.mode == SEPARATE for own in usages) else PACKED,
    )
    answer = ScoreAnswer(
        object="list",
        model=model.name,
        data=[PairScore(place, scores[place]) for place in sorted(scores)],
        errors=[ScoreError(place, errors[place]) for place in sorted(errors)],
        usage=ScoreTokens.of(usage),
    )
    return json_response(answer)
