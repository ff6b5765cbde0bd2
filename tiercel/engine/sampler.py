"""Next tokens from logits, for mixed parameters in one batch, without a look from the host.

Order: grammar masks and bans (padding ids, `allowed_token_ids`, `bad_words`, stop tokens before
`min_tokens`), penalties, `logit_bias`; cuts by top-k, top-p and min-p; then the draw
(`ops/sample_tokens.py`). Each stage runs for the rows that ask for it, whose parameters it reads
from their persistent rows; a row's result depends on its own logits and key only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tiercel.engine.copies import HostCopies
from tiercel.engine.penalties import Penalties
from tiercel.engine.request import Request, TokenLogprobs
from tiercel.engine.rows import Rows, to_device
from tiercel.ops.sample_tokens import NO_TOKEN, NONFINITE, sample_tokens
from tiercel.params import SamplingParams
from tiercel.seeds import mix_key

NEG_INF = float("-inf")
PROBLEMS = {NONFINITE: "nonfinite_logits", NO_TOKEN: "no_valid_token"}


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Log-probabilities of P places: of given tokens, and of the most likely ones.

    Attributes:
        token_ids: (P,) int32.
        logprobs: (P,) float32 of these.
        top_ids: (P, count) int64, best first.
        top_logprobs: (P, count) float32.
    """

    token_ids: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All four."""
        return self.token_ids, self.logprobs, self.top_ids, self.top_logprobs

    def copied(self, copies: HostCopies) -> TopLogprobs:
        """The same on its way to the host."""
        return TopLogprobs(*map(copies.add, self.tensors))

    def entries(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """On the host: one entry per place, with its own count of the most likely tokens."""
        rows = zip(*(tensor.tolist() for tensor in self.tensors), counts, strict=True)
        return [
            TokenLogprobs(token_id, logprob, tuple(zip(ids[:n], values[:n], strict=True)))
            for token_id, logprob, ids, values, n in rows
        ]


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """Results of one step on the device, for L rows of logits.

    Attributes:
        token_ids: (L,) int32.
        problems: (L,) uint8, of `ops/sample_tokens.py`.
        lines: of these rows, which asked for log-probabilities, and
        logprobs: theirs.
    """

    token_ids: Tensor
    problems: Tensor
    lines: tuple[int, ...] = ()
    logprobs: TopLogprobs | None = None

    def copied(self, copies: HostCopies) -> DeviceSample:
        """The same on its way to the host."""
        return DeviceSample(
            copies.add(self.token_ids),
            copies.add(self.problems),
            self.lines,
            None if self.logprobs is None else self.logprobs.copied(copies),
        )


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


def host_result(sample: DeviceSample | None, requests: Sequence[Request]) -> Sampled:
    """Read a step's results, which have arrived on the host; lines of scratch are dropped."""
    if sample is None:
        return Sampled([], [], [])
    count = len(requests)
    logprobs: list[TokenLogprobs | None] = [None] * count
    if sample.logprobs is not None:
        counts = [requests[line].params.logprobs or 0 for line in sample.lines]
        for line, entry in zip(sample.lines, sample.logprobs.entries(counts), strict=True):
            logprobs[line] = entry
    problems = [PROBLEMS.get(code) for code in sample.problems[:count].tolist()]
    return Sampled(sample.token_ids[:count].tolist(), problems, logprobs)


@dataclass(frozen=True, slots=True)
class _Edits:
    """What one request changes in its logits, on the device."""

    banned: Tensor | None = None  # (vocab_size,) bool
    stop_ids: Tensor | None = None
    bias_ids: Tensor | None = None
    biases: Tensor | None = None
    bad_words: list[list[int]] = field(default_factory=list)


class Sampler:
    """Samples rows of logits and appends the tokens to their rows.

    Attributes:
        is_banned: (vocab_size,) uint8, 1 for padding of the vocabulary.
    """

    def __init__(
        self,
        banned_ids: Sequence[int],
        vocab_size: int,
        rows: Rows,
        encode: Callable[[str], list[list[int]]],
    ) -> None:
        """Set up.

        Args:
            banned_ids: token ids that no answer may hold (padding of the vocabulary).
            vocab_size: columns of the logits.
            rows: the engine's.
            encode: the token sequences that spell a bad word.
        """
        self._rows = rows
        self._vocab_size = vocab_size
        self.is_banned = torch.zeros(vocab_size, dtype=torch.uint8, device=rows.device)
        self.is_banned[list(banned_ids)] = 1
        self._encode = encode
        self._edits: dict[int, _Edits] = {}  # by engine row
        self._penalties = Penalties(vocab_size, rows)

    def enter(self, request: Request) -> None:
        """Stage the parameters of a request that got an engine row."""
        rows, params, row = self._rows, request.params, request.row
        values = {
            "temperature": 0.0 if params.is_greedy else params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "repetition": params.repetition_penalty,
        }
        for name, value in values.items():
            rows.stage(rows.values[name], (row,), [value])
        rows.stage(rows.top_k, (row,), [params.top_k if params.top_k > 0 else self._vocab_size])
        rows.stage(rows.key, (row,), [mix_key(request.seed, request.stream)])
        self._edits.pop(row, None)
        if _has_edits(params):
            self._edits[row] = self._make_edits(request)
        if params.has_penalties:
            self._penalties.enter(request)

    def __call__(self, logits: Tensor, requests: Sequence[Request], rows: Tensor) -> DeviceSample:
        """Draw, append and report.

        Args:
            logits: (L, vocab_size) float32, the raw ones; changed in place.
            requests: of the first lines; lines beyond are scratch.
            rows: (L,) int32, the engine row of each line.
        """
        asked = tuple(i for i, r in enumerate(requests) if r.params.logprobs is not None)
        is_changed = any(map(_is_changed, requests))
        raw = logits.index_select(0, self._index(asked)) if asked else None
        is_sound = None
        if is_changed:
            is_sound = logits.isfinite().all(dim=1).to(torch.uint8)
            self._process(logits, requests, rows)
        state = self._rows.sampling
        token_ids, problems = sample_tokens(logits, rows, state, self.is_banned, is_sound)
        penalised = [i for i, r in enumerate(requests) if r.params.has_penalties]
        if penalised:
            lines = self._index(penalised)
            self._penalties.count(rows[lines], token_ids[lines])
        if raw is None:
            return DeviceSample(token_ids, problems)
        most = max(requests[i].params.logprobs or 0 for i in asked)
        chosen = token_ids.index_select(0, self._index(asked))
        return DeviceSample(token_ids, problems, asked, top_logprobs(raw, chosen, most))

    def _index(self, lines: Sequence[int]) -> Tensor:
        return to_device(np.array(lines, np.int64), self._rows.device)

    def _make_edits(self, request: Request) -> _Edits:
        params, device = request.params, self._rows.device

        def ids(values: Sequence[int]) -> Tensor:
            return to_device(np.array(values, np.int64), device)

        banned = stop_ids = bias_ids = biases = None
        if params.allowed_token_ids is not None:
            banned = torch.ones(self._vocab_size, dtype=torch.bool, device=device)
            banned.index_fill_(0, ids(params.allowed_token_ids), 0)
        if params.min_tokens and request.stop_ids:
            stop_ids = ids(sorted(request.stop_ids))
        if params.logit_bias:
            bias_ids = ids(list(params.logit_bias))
            values = [NEG_INF if bias == -100 else bias for bias in params.logit_bias.values()]
            biases = to_device(np.array(values, np.float32), device)
        words = [ids for word in params.bad_words for ids in self._encode(word)]
        return _Edits(banned, stop_ids, bias_ids, biases, words)

    def _process(self, logits: Tensor, requests: Sequence[Request], rows: Tensor) -> None:
        """Apply what requests ask to their lines, in place."""
        self._mask(logits, requests)
        for i, request in enumerate(requests):
            edits = self._edits.get(request.row)
            if edits is not None:
                self._ban(logits[i], request, edits)
        penalised = [i for i, r in enumerate(requests) if r.params.has_penalties]
        if penalised:
            lines = self._index(penalised)
            picked = self._penalties.apply(logits.index_select(0, lines), rows[lines])
            logits.index_copy_(0, lines, picked)
        for i, request in enumerate(requests):
            edits = self._edits.get(request.row)
            if edits is not None and edits.bias_ids is not None and edits.biases is not None:
                logits[i].index_add_(0, edits.bias_ids, edits.biases)
        cutting = [i for i, r in enumerate(requests) if _is_cut(r.params)]
        if cutting:
            lines = self._index(cutting)
            logits.index_copy_(0, lines, self._cut(logits.index_select(0, lines), rows[lines]))

    def _mask(self, logits: Tensor, requests: Sequence[Request]) -> None:
        """Ban what the grammars of some requests do not allow next."""
        bound = [(i, r.matcher) for i, r in enumerate(requests) if r.matcher is not None]
        if not bound:
            return
        words = np.zeros((len(bound), -(-self._vocab_size // 32)), np.int32)
        for row, (_, matcher) in zip(words, bound, strict=True):
            matcher.fill_mask(row)
        lines = self._index([i for i, _ in bound])
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = (to_device(words, logits.device).unsqueeze(2) >> bits) & 1
        is_allowed = allowed.flatten(1)[:, : self._vocab_size] != 0
        picked = logits.index_select(0, lines).masked_fill_(~is_allowed, NEG_INF)
        logits.index_copy_(0, lines, picked)

    def _ban(self, line: Tensor, request: Request, edits: _Edits) -> None:
        if edits.banned is not None:
            line.masked_fill_(edits.banned, NEG_INF)
        output = request.output_token_ids
        for ids in edits.bad_words:
            # The token that would complete a bad word.
            before = len(ids) - 1
            if before <= len(output) and output[len(output) - before :] == ids[:-1]:
                line[ids[-1]].fill_(NEG_INF)  # to assign a number would wait for the device
        drawn = len(output) + request.num_sampling - 1  # this step samples too
        if edits.stop_ids is not None and drawn < request.params.min_tokens:
            line.index_fill_(0, edits.stop_ids, NEG_INF)

    def _cut(self, logits: Tensor, rows: Tensor) -> Tensor:
        state = self._rows

        def column(values: Tensor) -> Tensor:
            return values.index_select(0, rows).unsqueeze(1)

        temperature = column(state.values["temperature"])
        kept = is_kept(
            logits / temperature,
            column(state.top_k),
            column(state.values["top_p"]),
            column(state.values["min_p"]),
        )
        return logits.masked_fill_(~kept, NEG_INF)


def _has_edits(params: SamplingParams) -> bool:
    """Whether a request changes its own logits beyond penalties and cuts."""
    return bool(
        params.allowed_token_ids is not None
        or params.bad_words
        or params.min_tokens
        or params.logit_bias
    )


def _is_cut(params: SamplingParams) -> bool:
    is_cut = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return is_cut and not params.is_greedy


def _is_changed(request: Request) -> bool:
    params = request.params
    has_grammar = request.matcher is not None
    return has_grammar or _has_edits(params) or params.has_penalties or _is_cut(params)


def is_kept(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which tokens remain after top-k, top-p and min-p.

    A token is kept if fewer than `top_k` tokens come before it, the probability before it (of the
    top-k set, most likely first, ties by id) is below `top_p`, and it is at least `min_p` times as
    likely as the first.

    Args:
        logits: (rows, vocab_size), divided by the temperature.
        top_k: (rows, 1), vocab_size for all.
        top_p: (rows, 1).
        min_p: (rows, 1).

    Returns:
        (rows, vocab_size) bool.
    """
    ordered, ids = logits.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, NEG_INF)
    probs = ordered.softmax(dim=1)
    before = probs.cumsum(dim=1) - probs
    # The rounded sum may reach 1 early: top_p = 1 must not cut, whatever a neighbour asks.
    kept = ((before < top_p) | (top_p >= 1.0)) & (probs >= min_p * probs[:, :1])
    kept &= rank < top_k
    return torch.empty_like(kept).scatter_(1, ids, kept)


def top_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> TopLogprobs:
    """Log-probabilities of given tokens and of the most likely ones.

    Args:
        logits: (P, vocab_size) float32, raw.
        token_ids: (P,), one per row.
        count: most likely tokens to report, best first; all if there are fewer.
    """
    logprobs = logits.log_softmax(dim=1)
    chosen = logprobs.gather(1, token_ids.long().unsqueeze(1)).squeeze(1)
    values, ids = logprobs.topk(min(count, logits.shape[1]), dim=1)
    return TopLogprobs(token_ids, chosen, ids, values)
