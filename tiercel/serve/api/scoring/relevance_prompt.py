"""Does a document meet a query? Asked of a language model, to be answered by yes or no.

The question goes through the model's chat template; the score of a document is the share of yes.
Instruction, query and document stand in the rendered text as marks; what the template wrote around
them is cut there, so that their own text never becomes a control token, and all documents of a
query share everything before theirs.
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

# As Qwen3-Reranker was trained; other models understand it too.
SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCT: Final = "Given a web search query, retrieve relevant passages that answer the query"
PLAIN: Final = "\nDoes the document meet the query, yes or no? Answer:"
YES_NO: Final = ("yes", "no")


@dataclass(frozen=True, slots=True)
class RelevancePrompt:
    """What stands around a document, as token ids, and the two labels behind it."""

    prefix: list[int]
    suffix: list[int]
    labels: tuple[str, ...]


async def make_relevance_job(
    state: ServerState,
    model: ServedModel,
    form: RelevancePrompt,
    texts: Sequence[str],
    most: int | None,
    param: str,
) -> ScoreJob:
    """Ask it of documents; one that does not fit the context is an error of its own.

    Args:
        state: of this server.
        model: that judges.
        form: of the query.
        texts: the documents.
        most: tokens that a document may keep; None: all.
        param: the field of the documents, for errors.

    Raises:
        InvalidRequestError, ArgumentError: see `make_job`.
    """
    if sum(map(len, texts)) <= MAX_LOOP_CHARS:
        documents = _encode(model.tokenizer, texts, most)
    else:
        documents = await state.run_in_thread(_encode, model.tokenizer, texts, most)
    params = ScoreParams(
        labels=form.labels, suffix=form.suffix, normalize="labels", long_items="skip"
    )
    try:
        return await make_job(state, model, form.prefix, documents, params)
    except (ArgumentError, InvalidRequestError) as error:
        error.param = (error.param or "").replace("items", param) or None
        raise


def _encode(tokenizer: Tokenizer, texts: Sequence[str], most: int | None) -> list[list[int]]:
    return [tokenizer.encode_inner(text)[:most] for text in texts]


async def _render(state: ServerState, model: ServedModel, user: str) -> str:
    """The question as the model's template writes it, with thinking closed."""
    kwargs = {"enable_thinking": False}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    try:
        return await render_messages(state, model, Conversation(messages, template_kwargs=kwargs))
    except InvalidRequestError:  # some templates have no system turn
        messages = [{"role": "user", "content": f"{SYSTEM}\n{user}"}]
        return await render_messages(state, model, Conversation(messages, template_kwargs=kwargs))


async def make_relevance_prompt(
    state: ServerState, model: ServedModel, query: str, instruct: str | None, param: str = "query"
) -> RelevancePrompt:
    """Write the question that is asked of every document.

    Args:
        state: of this server.
        model: that judges.
        query: of a client.
        instruct: what makes a document relevant; None: as in a web search.
        param: the field of the query, for errors.

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
            raise client_error(
                400, "chat_template_error", "this model's chat template does not keep a message."
            )
        pieces.append(before)
    tokenizer = model.tokenizer
    ids = [tokenizer.encode(piece, parse_special=True) for piece in (*pieces, rendered)]
    own = [tokenizer.encode_inner(text) for text in (instruct, query)]
    prefix = tokenizer.with_bos([*ids[0], *own[0], *ids[1], *own[1], *ids[2]])
    return RelevancePrompt(prefix, ids[3], labels)
