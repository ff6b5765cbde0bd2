"""Next tokens from logits, for mixed parameters in one batch.

Order: bans (padding ids, `allowed_token_ids`, `bad_words`, stop tokens before `min_tokens`),
penalties, `logit_bias`; then greedy rows take the lowest id of the largest logit, and the others
divide by temperature, cut by top-k, top-p and min-p, and take the largest of logit + Gumbel noise,
which draws exactly from the remaining distribution. A row's result depends on its own logits and
key only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.engine.random import uniform_noise
from tiercel.engine.request import Request, TokenLogprobs
from tiercel.engine.seeds import mix_key

NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class Sampled:
    """Results of one step, on the host.

    Attributes:
        token_ids: per row.
        problems: per row, None, or ``nonfinite_logits`` / ``no_valid_token``.
        logprobs: per row, None where not asked.
    """

    token_ids: list[int]
    problems: list[str | None]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Samples rows of logits."""

    def __init__(
        self,
        banned_ids: Sequence[int],
        device: torch.device,
        encode: Callable[[str], list[list[int]]],
    ) -> None:
        """Set up.

        Args:
            banned_ids: token ids that no answer may hold (padding of the vocabulary).
            device: of the logits.
            encode: the token sequences that spell a bad word.
        """
        self._banned = torch.tensor(list(banned_ids), dtype=torch.int64, device=device)
        self._encode = encode

    def __call__(self, logits: Tensor, requests: Sequence[Request]) -> Sampled:
        """logits: (len(requests), vocab_size) float32, the raw ones; changed in place."""
        is_finite = logits.isfinite().all(dim=1)
        raw = {
            i: logits[i].clone() for i, r in enumerate(requests) if r.params.logprobs is not None
        }
        logits.index_fill_(1, self._banned, NEG_INF)
        for i, request in enumerate(requests):
            self._process(logits[i], request)
        chosen = logits.argmax(dim=1)
        is_possible = logits.gather(1, chosen.unsqueeze(1)).squeeze(1) > NEG_INF
        drawn = [i for i, request in enumerate(requests) if not request.params.is_greedy]
        if drawn:
            index = torch.tensor(drawn, device=logits.device)
            chosen[index] = draw(logits[index], [requests[i] for i in drawn])
        token_ids: list[int] = chosen.tolist()
        states = zip(is_finite.tolist(), is_possible.tolist(), strict=True)
        problems = [
            "nonfinite_logits" if not finite else (None if possible else "no_valid_token")
            for finite, possible in states
        ]
        logprobs = [
            top_logprobs(raw[i].unsqueeze(0), [token_ids[i]], request.params.logprobs or 0)[0]
            if i in raw
            else None
            for i, request in enumerate(requests)
        ]
        return Sampled(token_ids, problems, logprobs)

    def _process(self, row: Tensor, request: Request) -> None:
        """Apply what a request asks to its row of logits, (vocab_size,), in place."""
        params = request.params
        if params.allowed_token_ids is not None:
            banned = torch.ones_like(row, dtype=torch.bool)
            banned[torch.tensor(params.allowed_token_ids, device=row.device)] = False
            row.masked_fill_(banned, NEG_INF)
        if params.bad_words:
            self._ban_words(row, request)
        if len(request.output_token_ids) < params.min_tokens and request.stop_ids:
            row[torch.tensor(sorted(request.stop_ids), device=row.device)] = NEG_INF
        if params.has_penalties:
            apply_penalties(row, request)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=row.device)
            values = [NEG_INF if bias == -100 else bias for bias in params.logit_bias.values()]
            row[ids] += torch.tensor(values, dtype=row.dtype, device=row.device)

    def _ban_words(self, row: Tensor, request: Request) -> None:
        """Ban the token that would complete a bad word."""
        output = request.output_token_ids
        for word in request.params.bad_words:
            for ids in self._encode(word):
                before = len(ids) - 1
                if before <= len(output) and output[len(output) - before :] == ids[:-1]:
                    row[ids[-1]] = NEG_INF


def apply_penalties(row: Tensor, request: Request) -> None:
    """Repetition, frequency and presence penalties on one row of logits, in place.

    Source: "CTRL", arXiv 1909.05858, for repetition; the OpenAI API reference for the other two.
    """
    params = request.params
    if params.repetition_penalty != 1.0:
        ids = sorted({*request.prompt_token_ids, *request.output_token_ids})
        seen = torch.tensor(ids, device=row.device)
        values, penalty = row[seen], params.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if request.output_token_ids and (params.frequency_penalty or params.presence_penalty):
        counts = Counter(request.output_token_ids)
        ids_in_output = torch.tensor(list(counts), device=row.device)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        row[ids_in_output] -= times * params.frequency_penalty + params.presence_penalty


def draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Draw one token per row from softmax(logits / temperature), cut by top-k, top-p and min-p.

    Args:
        logits: (rows, vocab_size) float32, processed.
        requests: whose parameters, seed and position apply, one per row.

    Returns:
        (rows,) int64 token ids.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device).unsqueeze(1)

    params = [request.params for request in requests]
    scaled = logits / column([p.temperature for p in params])
    if any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params):
        scaled = cut(
            scaled,
            column([p.top_k if p.top_k > 0 else logits.shape[1] for p in params]),
            column([p.top_p for p in params]),
            column([p.min_p for p in params]),
        )
    keys = [mix_key(r.seed, r.stream, r.num_tokens) for r in requests]
    noise = uniform_noise(torch.tensor(keys, device=logits.device), logits.shape[1])
    gumbel = noise.log_().neg_().log_().neg_()
    return (scaled + gumbel).argmax(dim=1)


def cut(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set all but the kept tokens to -inf.

    A token is kept if fewer than `top_k` tokens come before it, the probability before it (of the
    top-k set, most likely first, ties by id) is below `top_p`, and it is at least `min_p` times as
    likely as the first.

    Args:
        logits: (rows, vocab_size).
        top_k: (rows, 1), vocab_size for all.
        top_p: (rows, 1).
        min_p: (rows, 1).
    """
    ordered, ids = logits.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, NEG_INF)
    probs = ordered.softmax(dim=1)
    before = probs.cumsum(dim=1) - probs
    # The rounded sum may reach 1 early: top_p = 1 must not cut, whatever a neighbour asks.
    is_kept = ((before < top_p) | (top_p >= 1.0)) & (probs >= min_p * probs[:, :1])
    ordered = ordered.masked_fill(~is_kept, NEG_INF)
    return torch.empty_like(ordered).scatter_(1, ids, ordered)


def top_logprobs(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens and of the most likely ones.

    Args:
        logits: (rows, vocab_size) float32, raw.
        token_ids: one per row.
        count: most likely tokens to report, best first; all if there are fewer.
    """
    logprobs = logits.log_softmax(dim=1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    values, ids = logprobs.topk(min(count, logits.shape[1]), dim=1)
    rows = zip(token_ids, chosen.squeeze(1).tolist(), ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprobs(token_id, logprob, tuple(zip(top_ids, top_values, strict=True)))
        for token_id, logprob, top_ids, top_values in rows
    ]
