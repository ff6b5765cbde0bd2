"""Admission: checks before a request costs anything, and the error of one that ends early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tiercel.errors import InternalError, InvalidRequestError, TiercelError
from tiercel.params import Limits
from tiercel.request.request import TokenUpdate
from tiercel.serve.http.errors import client_error, overload_error
from tiercel.serve.served_model import ServedModel

_ENDINGS: Final = {
    "no_valid_token": "no token is left that may be generated.",
    "schema_too_complex": "the grammar took too long for one token.",
}


def check_counts(num_prompts: int, n: int, limits: Limits, param: str = "prompt") -> None:
    """Check the number of prompts and completions of one request.

    Args:
        num_prompts: prompts of the request.
        n: completions of each prompt.
        limits: limits of this server.
        param: field that holds the prompts.

    Raises:
        InvalidRequestError: too many prompts, or too many completions in total.
    """
    if not 1 <= num_prompts <= limits.max_prompts:
        raise InvalidRequestError(
            f"{param} holds {num_prompts} prompts.",
            hint=f"Send 1 to {limits.max_prompts}.",
            param=param,
        )
    if n > limits.max_n:
        raise InvalidRequestError(
            f"n={n} is out of range.", hint=f"Use 1 to {limits.max_n}.", param="n"
        )
    if num_prompts * n > limits.max_answers:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n={n} are {num_prompts * n} answers.",
            hint=f"Ask for at most {limits.max_answers} in one request.",
            param="n",
        )


def check_queue(model: ServedModel, num_answers: int, limits: Limits) -> None:
    """Refuse a request that the queue could never take, even when it is empty.

    Raises:
        InvalidRequestError: more completions than may run and wait.
    """
    most = limits.max_waiting_requests + model.num_rows
    if num_answers > most:
        raise InvalidRequestError(
            f"{num_answers} answers in one request are more than this server runs and queues.",
            hint=f"Ask for at most {most}.",
            param="n",
        )


def check_capacity(
    model: ServedModel, prompts: Sequence[Sequence[int]], n: int, max_tokens: int | None
) -> None:
    """Refuse completions of one prompt that the KV cache could never hold together.

    Args:
        model: the served model.
        prompts: token ids of each prompt.
        n: completions of each prompt; they share the prompt's blocks.
        max_tokens: limit of the request; None is the rest of the context, which always fits.

    Raises:
        InvalidRequestError: with both numbers.
    """
    if max_tokens is None:
        return
    capacity = model.info.capacity_tokens
    for prompt in prompts:
        left = model.info.max_model_len - len(prompt)
        needed = len(prompt) + n * min(max_tokens, left)
        if needed > capacity:
            raise InvalidRequestError(
                f"n={n} answers of {max_tokens} tokens to a prompt of {len(prompt)} need {needed}"
                f" tokens of cache but it holds {capacity}.",
                hint="Lower max_tokens or n.",
                param="n" if n > 1 else "max_tokens",
            )


def early_end_error(update: TokenUpdate) -> TiercelError:
    """The error of a completion whose finish reason is ``error`` or ``abort``."""
    if update.finish_reason == "abort":
        return overload_error("draining", "The server is shutting down.", 1)
    reason = str(update.stop_reason)
    if reason in _ENDINGS:
        return client_error(400, reason, _ENDINGS[reason])
    error = InternalError(f"the answer ended with {reason}.")
    error.code = reason
    return error
