"""Tokens and their log-probabilities in the formats of the APIs.

A token is a sequence of bytes. Bytes that are not whole characters become U+FFFD in its text, and
`bytes` has their values. A control token has its name as text, and no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from tiercel.request.request import TokenLogprobs
from tiercel.serve.api.openai.completion_types import (
    LogprobEntry,
    PromptLogprobs,
    RankedLogprob,
    TokenLogprob,
)
from tiercel.text.tokenizer import Tokenizer

# Stands for minus infinity, which JSON lacks: a token that cannot occur.
LEAST_LOGPROB: Final = -9999.0


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of one token, or the name of a control token."""
    if token_id >= tokenizer.vocab_size:
        return ""  # an unused row of the output matrix
    if tokenizer.is_special(token_id):
        return tokenizer.token_text(token_id)
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def token_bytes(tokenizer: Tokenizer, token_id: int) -> list[int] | None:
    """The bytes of one token; None for a control token."""
    if token_id >= tokenizer.vocab_size or tokenizer.is_special(token_id):
        return None
    return list(tokenizer.token_bytes(token_id))


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold; finite values do not change."""
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], num_top: int
) -> list[TokenLogprob]:
    """Entries of `logprobs.content`: the token, and the `num_top` most likely at its position."""
    return [
        TokenLogprob(
            token_name(tokenizer, entry.token_id),
            finite(entry.logprob),
            token_bytes(tokenizer, entry.token_id),
            [
                LogprobEntry(
                    token_name(tokenizer, token_id),
                    finite(logprob),
                    token_bytes(tokenizer, token_id),
                )
                for token_id, logprob in islice(entry.top, num_top)
            ],
        )
        for entry in entries
    ]


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], num_top: int
) -> PromptLogprobs:
    """The `prompt_logprobs` of vLLM: id -> entry for each prompt token, None for the first token.

    The rank is 1 for the most likely token, and None for a token that is not among the top ones.
    """
    listed: PromptLogprobs = [None]
    for entry in entries:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, 1)}
        shown = dict(islice(entry.top, num_top)) | {entry.token_id: entry.logprob}
        listed.append(
            {
                str(token_id): RankedLogprob(
                    finite(logprob), ranks.get(token_id), token_name(tokenizer, token_id)
                )
                for token_id, logprob in shown.items()
            }
        )
    return listed


def completion_top(tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
    """An entry of `top_logprobs` of raw completions: text -> log-probability.

    Of tokens with the same text the most likely counts. The token itself is always there, with the
    value of `token_logprobs`: clients compare the two for equality to see whether it is the best.
    """
    shown: dict[str, float] = {}
    for token_id, logprob in (*islice(entry.top, num_top), (entry.token_id, entry.logprob)):
        text = token_name(tokenizer, token_id)
        shown[text] = max(finite(logprob), shown.get(text, LEAST_LOGPROB))
    return shown
