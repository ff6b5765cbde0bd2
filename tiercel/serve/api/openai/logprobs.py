"""Tokens and their log-probabilities as the APIs show them.

A token stands for bytes. Where they are no whole characters its text has U+FFFD in their place, and
`bytes` tells what they are. A control token shows its name and has no bytes.
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

# JSON has no infinity: a token that cannot occur.
LEAST_LOGPROB: Final = -9999.0


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of one token, or the name of a control token."""
    if token_id >= tokenizer.vocab_size:
        return ""  # a row of the output matrix that stands for nothing
    if tokenizer.is_special(token_id):
        return tokenizer.token_text(token_id)
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def token_bytes(tokenizer: Tokenizer, token_id: int) -> list[int] | None:
    """The bytes of one token; None for a control token."""
    if token_id >= tokenizer.vocab_size or tokenizer.is_special(token_id):
        return None
    return list(tokenizer.token_bytes(token_id))


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold; the same number for the same number."""
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], num_top: int
) -> list[TokenLogprob]:
    """Entries of `logprobs.content`: the token, and the `num_top` most likely at its place."""
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
    """The `prompt_logprobs` of vLLM: per token of the prompt, None for the first, id -> entry.

    The rank is 1 for the most likely; None for a token that is not among the most likely.
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

    Of tokens with one text the most likely counts. The token itself is always there, with the very
    number of `token_logprobs`: clients compare the two for equality to see whether it is the best.
    """
    shown: dict[str, float] = {}
    for token_id, logprob in (*islice(entry.top, num_top), (entry.token_id, entry.logprob)):
        text = token_name(tokenizer, token_id)
        shown[text] = max(finite(logprob), shown.get(text, LEAST_LOGPROB))
    return shown
