"""The relevance prompt of rerankers: does a document meet a query, yes or no?

The chat template renders the question with placeholders for instruction, query and document. The
rendered text is split at the placeholders, so that client text never becomes a control token, and
all documents of a query share the prompt before them. The score of a document is the probability of
yes against no.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tiercel.errors import ArgumentError, InvalidRequestError
from tiercel.params import LIMITS
from tiercel.request.score_inputs import ScoreJob
from tiercel.request.score_params import ScoreParams
from tiercel.serve.api.scoring.score_jobs import MAX_LOOP_CHARS, make_job
from tiercel.serve.generation.prompts import Conversation, render_messages
from tiercel.serve.http.errors import client_error
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import ServerState
from tiercel.text.tokenizer import Tokenizer, check_text

# The prompt of Qwen3-Reranker's training; other models understand it too.
SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCT: Final = "Given a web search query, retrieve relevant passages that answer the query"
PLAIN: Final = "\nDoes the document meet the query, yes or no? Answer:"
YES_NO: Final = ("yes", "no")


@dataclass(frozen=True, slots=True)
class RelevancePrompt:
    """The prompt around a document as token ids, and the two labels after it."""

    prefix: list[int]
    suffix: list[int]
    labels: tuple[str, ...]


async def make_relevance_job(
    state: ServerState,
    model: ServedModel,
    prompt: RelevancePrompt,
    texts: Sequence[str],
    most: int | None,
    param: str,
) -> ScoreJob:
    """Make the scoring job of documents; one that does not fit the context has an error of its own.

    Args:
        state: state of this server.
        model: the served model.
        prompt: prompt of the query.
        texts: documents.
        most: limit of a document in tokens, beyond which it is truncated; None: no limit.
        param: field of the documents, for errors.

    Raises:
        InvalidRequestError, ArgumentError: see `make_job`.
    """
    if sum(map(len, texts)) <= MAX_LOOP_CHARS:
        documents = _encode(model.tokenizer, texts, most)
    else:
        documents = await state.run_in_thread(_encode, model.tokenizer, texts, most)
    params = ScoreParams(
        labels=prompt.labels, suffix=prompt.suffix, normalize="labels", long_items="skip"
    )
    try:
        return await make_job(state, model, prompt.prefix, documents, params)
    except (ArgumentError, InvalidRequestError) as error:
        error.param = (error.param or "").replace("items", param) or None
        raise


def _encode(tokenizer: Tokenizer, texts: Sequence[str], most: int | None) -> list[list[int]]:
    return [tokenizer.encode_inner(text)[:most] for text in texts]


async def _render(state: ServerState, model: ServedModel, user: str) -> str:
    """The question, rendered by the chat template with thinking switched off."""
    kwargs = {"enable_thinking": False}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    try:
        return await render_messages(state, model, Conversation(messages, template_kwargs=kwargs))
    except InvalidRequestError:  # some templates have no system role
        messages = [{"role": "user", "content": f"{SYSTEM}\n{user}"}]
        return await render_messages(state, model, Conversation(messages, template_kwargs=kwargs))


async def make_relevance_prompt(
    state: ServerState, model: ServedModel, query: str, instruct: str | None, param: str = "query"
) -> RelevancePrompt:
    """Make the prompt that surrounds every document.

    Args:
        state: state of this server.
        model: the served model.
        query: query of the request.
        instruct: instruction that defines relevance; None: that of a web search.
        param: field of the query, for errors.

    Raises:
        InvalidRequestError: a text is too long, or the template does not keep it.
    """
    instruct = INSTRUCT if instruct is None else instruct
    for name, text in (("instruct", instruct), (param, query)):
        check_text(text, name)
        if len(text) > model.info.max_model_len * LIMITS.max_prompt_bytes_per_token:
            raise client_error(
                400,
                "context_length_exceeded",
                f"{name} has {len(text)} characters but the context holds "
                f"{model.info.max_model_len} tokens.",
                hint="Shorten it.",
                param=name,
            )
    placeholders = tuple(f"{secrets.randbits(96):032d}" for _ in range(3))
    user = (
        f"<Instruct>: {placeholders[0]}\n<Query>: {placeholders[1]}\n<Document>: {placeholders[2]}"
    )
    if model.template is None:
        rendered, labels = f"{SYSTEM}\n{user}{PLAIN}", tuple(f" {label}" for label in YES_NO)
    else:
        rendered, labels = await _render(state, model, user), YES_NO
    segments = []
    for placeholder in placeholders:
        before, found, rendered = rendered.partition(placeholder)
        if not found:
            raise client_error(
                400, "chat_template_error", "this model's chat template does not keep a message."
            )
        segments.append(before)
    tokenizer = model.tokenizer
    ids = [tokenizer.encode(segment, parse_special=True) for segment in (*segments, rendered)]
    own = [tokenizer.encode_inner(text) for text in (instruct, query)]
    prefix = tokenizer.with_bos([*ids[0], *own[0], *ids[1], *own[1], *ids[2]])
    return RelevancePrompt(prefix, ids[3], labels)
