"""`/v1/decisions`: OpenAI's Decisions API: probabilities of answers to questions about one input.

The chat template renders the input, and every question is an item after it. The item includes the
end of the message, the start of the assistant's turn and its closed thinking. So all questions of a
request are one list that shares the input, each with labels of its own.

The probabilities are those of the labels relative to each other. There is no published formula for
`confidence`; ours is (max p - 1/k) / (1 - 1/k) for a choice among k, and for a score with levels
0 to k - 1 one minus its standard deviation over (k - 1) / 2, clipped to 0 .. 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute

from tiercel.errors import ArgumentError, ContextLengthError
from tiercel.params import LIMITS
from tiercel.request.request import Request
from tiercel.request.score_run import ScoreRun, make_run
from tiercel.request.score_task import make_trie
from tiercel.serve.api.info_routes import json_response
from tiercel.serve.api.model_routes import model_routes
from tiercel.serve.api.scoring.decision_input import answer_labels, input_messages, question_text
from tiercel.serve.api.scoring.decision_types import (
    MAX_QUESTIONS,
    Answer,
    ChoiceAnswer,
    ChoiceProbability,
    ChoiceQuestion,
    DecisionsAnswer,
    DecisionsRequest,
    DecisionUsage,
    InputDetails,
    LevelProbability,
    PredicateAnswer,
    PredicateQuestion,
    Question,
    ScoreAnswer,
)
from tiercel.serve.api.scoring.score_jobs import check_capacity, run_job
from tiercel.serve.generation.prompts import free_template_worker, knows_developer
from tiercel.serve.http.logs import request_log
from tiercel.serve.http.route_docs import RouteDoc
from tiercel.serve.served_model import ServedModel
from tiercel.serve.state import ServerState
from tiercel.text.chat_template import encode_around
from tiercel.text.tokenizer import Tokenizer, check_text

PATH: Final = "/v1/decisions"
ALIAS: Final = "/decisions"
_PLAIN_END: Final = "\nAnswer:"  # for models without a chat template

DOCS: Final = (
    RouteDoc(
        PATH,
        "Probabilities of the answers to questions about an input.",
        DecisionsRequest,
        DecisionsAnswer,
        "post",
        aliases=(ALIAS,),
        errors=(404, 429, 503),
    ),
)


def routes(state: ServerState) -> list[BaseRoute]:
    """The routes of this module."""
    return model_routes(state, (PATH, ALIAS), DecisionsRequest, _answer)


@dataclass(frozen=True, slots=True)
class _Job:
    """The questions of a request as a scoring job."""

    run: ScoreRun
    prompt_tokens: int
    num_items: int

    @property
    def requests(self) -> Sequence[Request]:
        return self.run.requests

    def output(self) -> list[npt.NDArray[np.float64]]:
        """For each question the log-probabilities of its labels over the vocabulary."""
        self.run.check_ended()
        return self.run.label_values()


async def _answer(
    state: ServerState, model: ServedModel, request: HttpRequest, body: DecisionsRequest
) -> Response:
    model.check_name(body.model)
    if not 1 <= len(body.questions) <= MAX_QUESTIONS:
        raise ArgumentError(
            f"questions holds {len(body.questions)}.",
            hint=f"Give 1 to {MAX_QUESTIONS}.",
            param="questions",
        )
    messages = input_messages(body.input)
    texts = [question_text(x, f"questions[{i}]") for i, x in enumerate(body.questions)]
    _check_texts(model, messages, texts)
    if model.template is None:
        prefix, suffix = await state.run_in_thread(_encode_plainly, model.tokenizer, messages)
    else:
        async with free_template_worker(state):
            prefix, suffix = await state.run_in_thread(
                encode_around,
                model.tokenizer,
                model.template,
                _open(messages, has_developer=knows_developer(model)),
                template_kwargs={"enable_thinking": False},
            )
    job = await state.run_in_thread(_make_job, model, prefix, suffix, texts, body.questions)
    check_capacity(model, job.requests, "input")
    values = await run_job(state, job, request_log(request))
    pairs = zip(body.questions, values, strict=True)
    cached, tokens = job.run.num_cached, job.prompt_tokens
    block = model.info.block_size
    kept = len(prefix) // block * block if model.info.has_prefix_cache else 0
    usage = DecisionUsage(
        input_tokens=tokens,
        input_tokens_details=InputDetails(cached, max(0, kept - cached)),
        total_tokens=tokens,
    )
    answer = DecisionsAnswer(
        model=model.name,
        answers=[make_answer(question, own) for question, own in pairs],
        usage=usage,
        label_mass=[float(np.exp(own).sum()) for own in values] if body.debug else None,
    )
    return json_response(answer)


def _check_texts(
    model: ServedModel, messages: Sequence[dict[str, object]], texts: Sequence[str]
) -> None:
    """Refuse texts that cannot fit, before they are encoded, and texts that are not Unicode."""
    named = [("input", "\n".join(str(message["content"]) for message in messages))]
    named += [(f"questions[{i}].instructions", text) for i, text in enumerate(texts)]
    for param, text in named:
        check_text(text, param)
        if len(text) > model.info.max_model_len * LIMITS.max_prompt_bytes_per_token:
            raise _too_long(model, f"{param} has {len(text)} characters", param)


def _too_long(model: ServedModel, what: str, param: str) -> ContextLengthError:
    return ContextLengthError(
        f"{what} but the context holds {model.info.max_model_len} tokens.",
        hint="Shorten it.",
        param=param,
    )


def _open(messages: Sequence[dict[str, object]], *, has_developer: bool) -> list[dict[str, object]]:
    """The messages, ending with a user's message to which questions can be added."""
    opened = [
        {**message, "role": "system"}
        if message["role"] == "developer" and not has_developer
        else dict(message)
        for message in messages
    ]
    if opened[-1]["role"] == "user":
        opened[-1]["content"] = f"{opened[-1]['content']}\n\n"
    else:
        opened.append({"role": "user", "content": ""})
    return opened


def _encode_plainly(
    tokenizer: Tokenizer, messages: Sequence[dict[str, object]]
) -> tuple[list[int], list[int]]:
    text = "\n\n".join(str(message["content"]) for message in messages)
    prefix = tokenizer.with_bos(tokenizer.encode(f"{text}\n\n"))
    return prefix, tokenizer.encode_inner(_PLAIN_END)


def _make_job(
    model: ServedModel,
    prefix: list[int],
    suffix: list[int],
    texts: Sequence[str],
    questions: Sequence[Question],
) -> _Job:
    info, tokenizer = model.info, model.tokenizer
    lead = " " if model.template is None else ""
    tries, known = [], {}
    for question in questions:
        labels = answer_labels(question)
        if labels not in known:
            known[labels] = make_trie([tokenizer.encode_inner(f"{lead}{x}") for x in labels])
        tries.append(known[labels])
    items = [[*tokenizer.encode_inner(text), *suffix] for text in texts]
    for number, (item, trie) in enumerate(zip(items, tries, strict=True)):
        if len(prefix) + len(item) + trie.depth > info.max_model_len:
            raise _too_long(
                model,
                f"questions[{number}] has {len(item)} tokens after an input of {len(prefix)}",
                f"questions[{number}]" if len(prefix) < info.max_model_len else "input",
            )
    run = make_run(model.inputs, prefix, items, tries, longest_packed=info.longest_packed_item)
    return _Job(run, len(prefix) + sum(map(len, items)), len(items))


def make_answer(question: Question, logprobs: npt.NDArray[np.float64]) -> Answer:
    """The answer to a question, from the log-probabilities of its labels in their order."""
    weights = np.exp(logprobs - logprobs.max())
    shares: list[float] = (weights / weights.sum()).tolist()
    if isinstance(question, PredicateQuestion):
        return PredicateAnswer(name=question.name, probability=shares[0])
    count = len(shares)
    if isinstance(question, ChoiceQuestion):
        top = max(shares)
        pairs = zip(question.choices, shares, strict=True)
        return ChoiceAnswer(
            name=question.name,
            choice=question.choices[shares.index(top)].value,
            confidence=_clipped((top - 1 / count) / (1 - 1 / count)),
            probabilities=[ChoiceProbability(choice.value, p) for choice, p in pairs],
        )
    mean = sum(p * j for j, p in enumerate(shares))
    spread = math.sqrt(sum(p * (j - mean) ** 2 for j, p in enumerate(shares)))
    levels = zip(question.levels, shares, strict=True)
    return ScoreAnswer(
        name=question.name,
        score=mean,
        confidence=_clipped(1 - spread / ((count - 1) / 2)),
        probabilities=[LevelProbability(j, x.label, p) for j, (x, p) in enumerate(levels)],
    )


def _clipped(value: float) -> float:
    return min(1.0, max(0.0, value))
