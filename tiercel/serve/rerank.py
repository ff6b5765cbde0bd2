"""`/rerank`: documents in the order of their relevance to a query, judged by a language model.

The model is asked, through its chat template, whether a document meets the query, to be answered
by yes or no; its score is the share of yes. Instruction, query and document stand in the rendered
text as marks; what the template wrote around them is cut there, so that their own text never
becomes a control token, and all documents share everything before theirs.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import UNSET, Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tiercel.engine.score_params import ScoreParams
from tiercel.errors import ArgumentError, InvalidRequestError
from tiercel.params import LIMITS
from tiercel.serve.body import read_body
from tiercel.serve.errors import refusal
from tiercel.serve.info_routes import json_response
from tiercel.serve.logs import request_log
from tiercel.serve.prompts import Conversation, render_messages
from tiercel.serve.respond import while_connected
from tiercel.serve.route_docs import RouteDoc
from tiercel.serve.scoring import MAX_LOOP_CHARS, make_job, run_job
from tiercel.serve.state import ServedModel, ServerState
from tiercel.text.tokenizer import Tokenizer, check_text

PATHS: Final = ("/v1/rerank", "/rerank", "/v2/rerank")
# As Qwen3-Reranker was trained; other models understand it too.
SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCT: Final = "Given a web search query, retrieve relevant passages that answer the query"
PLAIN: Final = "\nDoes the document meet the query, yes or no? Answer:"
YES_NO: Final = ("yes", "no")

Count = Annotated[int, Meta(ge=1, le=LIMITS.max_tokens)]


class Document(Struct, kw_only=True):
    """A document with its text; other fields are its owner's."""

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
    """A document as it came."""

    text: str


class RerankResult(Struct, frozen=True, omit_defaults=True):
    """One document: its place in the request, and the probability of yes."""

    index: int
    relevance_score: float
    document: DocumentText | None = None


class RerankError(Struct, frozen=True):
    """A document without a score."""

    index: int
    message: str


class RerankUsage(Struct, frozen=True):
    """Tokens of what the documents share, once, and of all of them."""

    prompt_tokens: int
    total_tokens: int


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

    async def create(request: Request) -> Response:
        model = state.ready_model()
        body = await read_body(request, RerankRequest, state.settings.limits)
        return await while_connected(request, _answer(state, model, request, body))

    return [Route(path, create, methods=["POST"]) for path in PATHS]


@dataclass(frozen=True, slots=True)
class _Form:
    """What stands around a document, as token ids, and the two labels behind it."""

    prefix: list[int]
    suffix: list[int]
    labels: tuple[str, ...]


async def _answer(
    state: ServerState, model: ServedModel, request: Request, body: RerankRequest
) -> Response:
    model.check_name(body.model)
    if body.instruct is not None and body.instruction is not None:
        raise ArgumentError("both instruct and instruction are given.", param="instruction")
    texts = [x if isinstance(x, str) else x.text for x in body.documents]
    if not texts:
        raise ArgumentError("documents is empty.", hint="Give at least one.", param="documents")
    form = await _make_form(state, model, body)
    most = _most_tokens(body, form)
    size = sum(map(len, texts))
    if size <= MAX_LOOP_CHARS:
        documents = _encode(model.tokenizer, texts, most)
    else:
        documents = await state.off_loop(_encode, model.tokenizer, texts, most)
    params = ScoreParams(
        labels=form.labels, suffix=form.suffix, normalize="labels", long_items="skip"
    )
    try:
        job = await make_job(state, model, form.prefix, documents, params)
    except (ArgumentError, InvalidRequestError) as error:
        error.param = (error.param or "").replace("items", "documents") or None
        raise
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
    usage = RerankUsage(tokens, tokens)
    name = f"rerank-{secrets.token_hex(12)}"
    return json_response(RerankAnswer(name, model.name, results, usage, errors))


def _encode(tokenizer: Tokenizer, texts: list[str], most: int | None) -> list[list[int]]:
    return [tokenizer.encode_inner(text)[:most] for text in texts]


def _most_tokens(body: RerankRequest, form: _Form) -> int | None:
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


async def _render(state: ServerState, model: ServedModel, user: str) -> str:
    """The question as the model's template writes it, with thinking closed."""
    kwargs = {"enable_thinking": False}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    try:
        return await render_messages(state, model, Conversation(messages, template_kwargs=kwargs))
    except InvalidRequestError:  # some templates have no system turn
        messages = [{"role": "user", "content": f"{SYSTEM}\n{user}"}]
        return await render_messages(state, model, Conversation(messages, template_kwargs=kwargs))


async def _make_form(state: ServerState, model: ServedModel, body: RerankRequest) -> _Form:
    """Write the question that is asked of every document."""
    given = body.instruct if body.instruct is not None else body.instruction
    instruct = INSTRUCT if given is None else given
    for name, text in (("instruct", instruct), ("query", body.query)):
        check_text(text, name)
        if len(text) > model.info.max_model_len * LIMITS.max_prompt_bytes_per_token:
            raise refusal(
                400,
                "context_length_exceeded",
                f"{name} has {len(text)} characters but the context holds "
                f"{model.info.max_model_len} tokens.",
                hint="Shorten it.",
                param=name,
            )
    marks = tuple(f"{secrets.randbits(96):032d}" for _ in range(3))
    user = f"<Instruct>: {marks[0]}\n<Query>: {marks[1]}\n<Document>: {marks[2]}"
    if model.template is None:
        rendered, labels = f"{SYSTEM}\n{user}{PLAIN}", tuple(f" {label}" for label in YES_NO)
    else:
        rendered, labels = await _render(state, model, user), YES_NO
    pieces = []
    for mark in marks:
        before, found, rendered = rendered.partition(mark)
        if not found:
            raise refusal(
                400, "chat_template_error", "this model's chat template does not keep a message."
            )
        pieces.append(before)
    tokenizer = model.tokenizer
    ids = [tokenizer.encode(piece, parse_special=True) for piece in (*pieces, rendered)]
    own = [tokenizer.encode_inner(text) for text in (instruct, body.query)]
    prefix = tokenizer.with_bos([*ids[0], *own[0], *ids[1], *own[1], *ids[2]])
    return _Form(prefix, ids[3], labels)
