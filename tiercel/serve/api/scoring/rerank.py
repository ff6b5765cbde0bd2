"""`/rerank`: documents in the order of their relevance to a query; see `relevance_prompt.py`."""

from __future__ import annotations

import secrets
from typing import Annotated, Final

from msgspec import UNSET, Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from tiercel.errors import ArgumentError
from tiercel.params import LIMITS
from tiercel.serve.api.info_routes import json_response
from tiercel.serve.api.model_routes import model_routes
from tiercel.serve.api.scoring.relevance_prompt import (
    RelevancePrompt,
    make_relevance_job,
    make_relevance_prompt,
)
from tiercel.serve.api.scoring.score_jobs import run_job
from tiercel.serve.http.logs import request_log
from tiercel.serve.http.route_docs import RouteDoc
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import ServerState

PATHS: Final = ("/v1/rerank", "/rerank", "/v2/rerank")

Count = Annotated[int, Meta(ge=1, le=LIMITS.max_tokens)]


class Document(Struct, kw_only=True):
    """A document with its text; other fields are ignored."""

    text: str


class RerankRequest(Struct, kw_only=True):
    """A query and documents."""

    model: str
    query: str
    documents: list[str | Document]
    top_n: Count | None = None
    return_documents: bool = False
    instruct: str | None = None
    instruction: str | None = None
    max_tokens_per_doc: Count | None = None
    truncate_prompt_tokens: Count | None = None
    user: object = UNSET


class DocumentText(Struct, frozen=True):
    """A document of the request."""

    text: str


class RerankResult(Struct, frozen=True, omit_defaults=True):
    """One document: its index in the request, and the probability of yes."""

    index: int
    relevance_score: float
    document: DocumentText | None = None


class RerankError(Struct, frozen=True):
    """A document without a score."""

    index: int
    message: str


class CachedTokens(Struct, frozen=True):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class RerankUsage(Struct, frozen=True):
    """Tokens of the shared prompt, once, and of all documents."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class RerankAnswer(Struct, frozen=True, omit_defaults=True):
    """The documents, best first; `errors` only where some have no score."""

    id: str
    model: str
    results: list[RerankResult]
    usage: RerankUsage
    errors: list[RerankError] = []


DOCS: Final = (
    RouteDoc(
        PATHS[0],
        "Documents in the order of their relevance.",
        RerankRequest,
        RerankAnswer,
        "post",
        aliases=PATHS[1:],
        errors=(404, 429, 503),
    ),
)


def routes(state: ServerState) -> list[BaseRoute]:
    """The routes of this module."""
    return model_routes(state, PATHS, RerankRequest, _answer)


async def _answer(
    state: ServerState, model: ServedModel, request: Request, body: RerankRequest
) -> Response:
    model.check_name(body.model)
    if body.instruct is not None and body.instruction is not None:
        raise ArgumentError("both instruct and instruction are given.", param="instruction")
    texts = [x if isinstance(x, str) else x.text for x in body.documents]
    if not texts:
        raise ArgumentError("documents is empty.", hint="Give at least one.", param="documents")
    given = body.instruct if body.instruct is not None else body.instruction
    form = await make_relevance_prompt(state, model, body.query, given)
    most = _most_tokens(body, form)
    job = await make_relevance_job(state, model, form, texts, most, "documents")
    output = await run_job(state, job, request_log(request))
    scores = output.probs[:, 0].tolist()
    order = sorted(set(range(len(texts))) - output.errors.keys(), key=lambda i: -scores[i])
    results = [
        RerankResult(i, scores[i], DocumentText(texts[i]) if body.return_documents else None)
        for i in order[: body.top_n]
    ]
    errors = [
        RerankError(i, text.replace(f"items[{i}]", f"documents[{i}]"))
        for i, text in output.errors.items()
    ]
    tokens = output.usage.prompt_tokens
    usage = RerankUsage(tokens, tokens, CachedTokens(output.usage.cached_tokens))
    name = f"rerank-{secrets.token_hex(12)}"
    return json_response(RerankAnswer(name, model.name, results, usage, errors))


def _most_tokens(body: RerankRequest, form: RelevancePrompt) -> int | None:
    """Tokens that a document may keep; None: all."""
    bounds = [] if body.max_tokens_per_doc is None else [body.max_tokens_per_doc]
    if body.truncate_prompt_tokens is not None:
        left = body.truncate_prompt_tokens - len(form.prefix) - len(form.suffix)
        if left < 1:
            taken = len(form.prefix) + len(form.suffix)
            raise ArgumentError(
                f"truncate_prompt_tokens={body.truncate_prompt_tokens} leaves nothing for a "
                f"document: query and instruction take {taken} tokens.",
                hint="Raise it, or shorten the query.",
                param="truncate_prompt_tokens",
            )
        bounds.append(left)
    return min(bounds, default=None)
