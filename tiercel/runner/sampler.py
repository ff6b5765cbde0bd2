"""The sampler: next tokens from logits, for mixed parameters in one batch; the host never waits.

Order: grammar masks and bans (padding ids, `allowed_token_ids`, `bad_words`, stop tokens before
`min_tokens`), penalties, `logit_bias`; cuts by top-k, top-p and min-p; then the sample
(`ops/sample_tokens.py`). Each stage runs for the rows that request it, whose parameters it reads
from their persistent rows; a row's result depends on its own logits and key only.

A row that verifies drafts has a logits row after each of its drafts too. Every option holds there
as if the drafts before it were in the answer already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain

import numpy as np
import torch
from msgspec import Struct, field
from torch import Tensor

from tiercel.ops.sample_tokens import SampleRows, draw_torch, sample_tokens
from tiercel.ops.verify_accept import Verified, verify_accept
from tiercel.params import SamplingParams
from tiercel.request.request import Request
from tiercel.runner.penalties import Penalties
from tiercel.runner.row_state import Rows, to_device
from tiercel.runner.sampler_output import SamplerOutput, top_logprobs
from tiercel.seeds import mix_key

NEG_INF = float("-inf")
_LEAST = torch.finfo(torch.float32).tiny  # what is smaller may become 0 on its way to the rows


class LogitsLayout(Struct, frozen=True):
    """Which logits rows belong to which of R engine rows, some of which verify drafts.

    Attributes:
        starts: (R + 1,) int32, the first logits row of each engine row.
        num_drafts: (R,) int32, number of drafts of each; logits rows after them are padding.
        widths: number of logits rows of each engine row that a request fills, on the host.
        planned: number of drafts of each that the plan allows. Of a row whose last token the host
            knows, they are the first of `Request.next_drafts`.
    """

    starts: Tensor
    num_drafts: Tensor
    widths: tuple[int, ...]
    planned: tuple[int, ...]


class _Edits(Struct, frozen=True):
    """The changes that one request makes to its logits, on the device."""

    banned: Tensor | None = None  # (vocab_size,) bool
    stop_ids: Tensor | None = None
    bias_ids: Tensor | None = None
    biases: Tensor | None = None
    bad_words: list[list[int]] = field(default_factory=list)


class Sampler:
    """Samples tokens from logits rows and appends them to their engine rows.

    Attributes:
        is_banned: (vocab_size,) uint8, 1 for padding of the vocabulary.
    """

    def __init__(
        self,
        banned_ids: Sequence[int],
        vocab_size: int,
        rows: Rows,
        encode: Callable[[str], list[list[int]]],
        least_chance: float = 0.0,
    ) -> None:
        """Set up.

        Args:
            banned_ids: token ids that no answer may hold (padding of the vocabulary).
            vocab_size: number of columns of the logits.
            rows: rows of the engine.
            encode: function that gives the token sequences that spell a bad word.
            least_chance: least acceptance probability of a draft that is worth making.
        """
        self._rows = rows
        self._theta = torch.full((1,), least_chance, device=rows.device)
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
            "top_p": max(params.top_p, _LEAST),
            "min_p": params.min_p,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "repetition": max(params.repetition_penalty, _LEAST),
        }
        for name, value in values.items():
            rows.stage(rows.values[name], (row,), [value])
        rows.stage(rows.top_k, (row,), [self._top_k(params)])
        rows.stage(rows.key, (row,), [mix_key(request.seed, request.stream)])
        self._edits.pop(row, None)
        if params.has_edits:
            self._edits[row] = self._make_edits(request)
        if params.has_penalties:
            self._penalties.enter(request)

    def __call__(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        rows: Tensor,
        layout: LogitsLayout | None = None,
    ) -> SamplerOutput:
        """Sample tokens and append them to their rows.

        Args:
            logits: (L, vocab_size) float32, the raw ones; changed in place.
            requests: requests of the first rows; rows beyond are scratch.
            rows: (R,) int32, engine rows.
            layout: the rows that the logits belong to; None: one logits row for each.
        """
        logits_rows = _LogitsRows(requests, layout)
        wanting = tuple(i for i, r in enumerate(requests) if r.params.logprobs is not None)
        is_changed = any(map(_is_changed, requests))
        raw = logits.index_select(0, self._index(logits_rows.of(wanting))) if wanting else None
        is_sound = None
        if is_changed:
            is_sound = logits.isfinite().all(dim=1).to(torch.uint8)
            self._process(logits, logits_rows, rows)
        state = self._rows.sampling
        if layout is None:
            token_ids, problems = sample_tokens(logits, rows, state, self.is_banned, is_sound)
            output = SamplerOutput(token_ids, problems)
            chosen = token_ids
        else:
            verified = self.accept(logits, rows, layout.starts, layout.num_drafts, is_sound)
            output = SamplerOutput(table=verified.table)
            chosen = verified.token_ids
        self._count(requests, rows, chosen, None if layout is None else verified)
        if raw is None:
            return output
        most = max(requests[i].params.logprobs or 0 for i in wanting)
        if layout is None:
            chosen = chosen.index_select(0, self._index(wanting))
        else:
            numbers, steps = map(self._index, logits_rows.rows_and_steps(wanting))
            chosen = chosen[numbers, steps]
        return replace(output, logprob_rows=wanting, logprobs=top_logprobs(raw, chosen, most))

    def accept(
        self,
        logits: Tensor,
        rows: Tensor,
        starts: Tensor,
        num_drafts: Tensor,
        is_sound: Tensor | None = None,
    ) -> Verified:
        """Choose, accept and append tokens of rows with drafts; see `verify_accept`."""
        return verify_accept(
            logits, starts, rows, num_drafts, self._rows.sampling, self._rows.drafts,
            self.is_banned, self._theta, is_sound,
        )  # fmt: skip

    def sample(
        self, logits: Tensor, params: SamplingParams, keys: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sample from logits that belong to no row; nothing is appended.

        Args:
            logits: (L, vocab_size) float32, the raw ones; unchanged.
            params: parameters of all L rows, without penalties and edits.
            keys: (L,) int64, see `seeds.py`.
            positions: (L,) int32, position of each sampled token in its text.

        Returns:
            As `sample_tokens`.
        """
        count, device = len(logits), logits.device
        rows = torch.arange(count, dtype=torch.int32, device=device)
        temperature = torch.full(
            (count,), 0.0 if params.is_greedy else params.temperature, device=device
        )
        state = SampleRows(rows, positions, temperature, keys)
        is_sound = None
        if _is_cut(params):
            is_sound = logits.isfinite().all(dim=1).to(torch.uint8)
            logits = self._cut(
                logits,
                temperature.unsqueeze(1),
                torch.full((count, 1), self._top_k(params), device=device),
                torch.full((count, 1), max(params.top_p, _LEAST), device=device),
                torch.full((count, 1), params.min_p, device=device),
            )
        return draw_torch(logits, rows, positions, state, self.is_banned, is_sound)

    def _count(
        self, requests: Sequence[Request], rows: Tensor, chosen: Tensor, verified: Verified | None
    ) -> None:
        """Count the new tokens of rows with penalties."""
        penalised = [i for i, r in enumerate(requests) if r.params.has_penalties]
        if not penalised:
            return
        index = self._index(penalised)
        is_new = None
        if verified is not None:
            steps = torch.arange(chosen.shape[1], device=rows.device)
            is_new = (steps < verified.num_new[index].unsqueeze(1)).int()
        self._penalties.count(rows[index], chosen[index], is_new)

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return to_device(np.array(numbers, np.int64), self._rows.device)

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

    def _process(self, logits: Tensor, logits_rows: _LogitsRows, rows: Tensor) -> None:
        """Apply the parameters of requests to their logits rows, in place."""
        requests = logits_rows.requests
        self._mask(logits, logits_rows)
        for i, request in enumerate(requests):
            edits = self._edits.get(request.row)
            if edits is not None:
                self._ban(logits, logits_rows, i, edits)
        penalised = [i for i, r in enumerate(requests) if r.params.has_penalties]
        if penalised:
            index = self._index(logits_rows.of(penalised))
            picked = logits.index_select(0, index)
            penalised_rows = self._rows_of(logits_rows, penalised, rows)
            drafts = self._drafts_before(logits_rows, penalised, penalised_rows)
            logits.index_copy_(0, index, self._penalties.apply(picked, penalised_rows, drafts))
        for i, request in enumerate(requests):
            edits = self._edits.get(request.row)
            if edits is not None and edits.bias_ids is not None and edits.biases is not None:
                own = logits[logits_rows.span(i)]
                own.index_add_(1, edits.bias_ids, edits.biases.expand(len(own), -1))
        cutting = [i for i, r in enumerate(requests) if _is_cut(r.params)]
        if cutting:
            index = self._index(logits_rows.of(cutting))
            picked = logits.index_select(0, index)
            columns = self._cut_columns(self._rows_of(logits_rows, cutting, rows))
            logits.index_copy_(0, index, self._cut(picked, *columns))

    def _rows_of(self, logits_rows: _LogitsRows, numbers: Sequence[int], rows: Tensor) -> Tensor:
        """The engine row of each logits row of some rows."""
        return rows.index_select(0, self._index(logits_rows.rows_and_steps(numbers)[0]))

    def _drafts_before(
        self, logits_rows: _LogitsRows, numbers: Sequence[int], rows: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """The drafts that `Penalties.apply` counts, for the logits rows of some rows."""
        if not logits_rows.has_drafts:
            return None
        steps = self._index(logits_rows.rows_and_steps(numbers)[1])
        ids = self._rows.drafts.draft_ids.index_select(0, rows)[:, 1:].long()
        index = torch.arange(ids.shape[1], device=rows.device)
        return ids, (index < steps.unsqueeze(1)).int()

    def _mask(self, logits: Tensor, logits_rows: _LogitsRows) -> None:
        """Ban the tokens that the grammars of some requests do not allow next."""
        requests = logits_rows.requests
        bound = [(i, r.matcher) for i, r in enumerate(requests) if r.matcher is not None]
        if not bound:
            return
        known = [logits_rows.known_drafts(i) for i, _ in bound]
        words = np.zeros((len(bound) + sum(map(len, known)), -(-self._vocab_size // 32)), np.int32)
        unfilled = iter(words)
        for (_, matcher), drafts in zip(bound, known, strict=True):
            matcher.fill_mask(next(unfilled))
            for draft in drafts:
                matcher.advance(draft)
                matcher.fill_mask(next(unfilled))
            matcher.rollback(len(drafts))
        spans = [logits_rows.span(i) for i, _ in bound]
        index = self._index(
            [
                span.start + step
                for span, drafts in zip(spans, known, strict=True)
                for step in range(1 + len(drafts))
            ]
        )
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = (to_device(words, logits.device).unsqueeze(2) >> bits) & 1
        is_allowed = allowed.flatten(1)[:, : self._vocab_size] != 0
        picked = logits.index_select(0, index).masked_fill_(~is_allowed, NEG_INF)
        logits.index_copy_(0, index, picked)

    def _ban(self, logits: Tensor, logits_rows: _LogitsRows, number: int, edits: _Edits) -> None:
        request, span = logits_rows.requests[number], logits_rows.span(number)
        own = logits[span]
        if edits.banned is not None:
            own.masked_fill_(edits.banned, NEG_INF)
        output = request.output_token_ids
        text = [*output, *logits_rows.known_drafts(number)] if edits.bad_words else output
        for step in range(1 + len(text) - len(output)):
            length = len(output) + step
            for ids in edits.bad_words:
                # The token that would complete a bad word.
                before = len(ids) - 1
                if before <= length and text[length - before : length] == ids[:-1]:
                    own[step, ids[-1]].fill_(NEG_INF)  # to assign a number would wait
        if edits.stop_ids is None:
            return
        least = request.params.min_tokens
        if logits_rows.layout is None:
            num_sampled = len(output) + request.num_ahead - 1  # this step samples too
            if num_sampled < least:
                own.index_fill_(1, edits.stop_ids, NEG_INF)
        elif len(output) < least:  # else it has enough tokens, whatever is under way
            steps = torch.arange(len(own), device=own.device)
            positions = steps + self._rows.num_tokens[request.row]
            is_early = positions < len(request.prompt_token_ids) + least
            ban = torch.where(is_early, NEG_INF, 0.0).unsqueeze(1)
            own.index_add_(1, edits.stop_ids, ban.expand(-1, len(edits.stop_ids)))

    def _top_k(self, params: SamplingParams) -> int:
        return params.top_k if params.top_k > 0 else self._vocab_size

    def _cut_columns(self, rows: Tensor) -> list[Tensor]:
        """The temperature, top-k, top-p and min-p of some rows, (rows, 1) each."""
        values = self._rows.values
        columns = (values["temperature"], self._rows.top_k, values["top_p"], values["min_p"])
        return [column.index_select(0, rows).unsqueeze(1) for column in columns]

    def _cut(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> Tensor:
        # Sampling bans padding of the vocabulary too, but only after these cuts.
        logits = logits.masked_fill(self.is_banned.view(torch.bool), NEG_INF)
        kept = is_kept(logits / temperature, top_k, top_p, min_p)
        return logits.masked_fill_(~kept, NEG_INF)


class _LogitsRows:
    """Which logits rows belong to which of the rows that requests fill, on the host."""

    def __init__(self, requests: Sequence[Request], layout: LogitsLayout | None) -> None:
        self.requests = requests
        self.layout = layout
        self._ends = None if layout is None else [0, *accumulate(layout.widths)]
        self.has_drafts = self._ends is not None and self._ends[-1] > len(requests)

    def span(self, number: int) -> slice:
        """The logits rows of a row."""
        if self._ends is None:
            return slice(number, number + 1)
        return slice(self._ends[number], self._ends[number + 1])

    def known_drafts(self, number: int) -> tuple[int, ...]:
        """The drafts of a row whose last token the host knows."""
        count = 0 if self.layout is None else self.layout.planned[number]
        return self.requests[number].next_drafts[:count]

    def of(self, numbers: Sequence[int]) -> list[int]:
        """The logits rows of some rows."""
        spans = map(self.span, numbers)
        return list(chain.from_iterable(range(span.start, span.stop) for span in spans))

    def rows_and_steps(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """The number of the row of each logits row of some rows, and the drafts before it."""
        spans = [(i, self.span(i)) for i in numbers]
        pairs = [(i, k) for i, span in spans for k in range(span.stop - span.start)]
        return [i for i, _ in pairs], [k for _, k in pairs]


def _is_cut(params: SamplingParams) -> bool:
    is_cut = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return is_cut and not params.is_greedy


def is_plain(request: Request) -> bool:
    """Whether a request samples from the model's logits as they are, without log-probabilities."""
    return request.params.logprobs is None and not _is_changed(request)


def _is_changed(request: Request) -> bool:
    params = request.params
    has_grammar = request.matcher is not None
    return has_grammar or params.has_edits or params.has_penalties or _is_cut(params)


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
    # The rounded sum may reach 1 early: top_p = 1 must not cut, whatever a neighbour requests.
    kept = ((before < top_p) | (top_p >= 1.0)) & (probs >= min_p * probs[:, :1])
    kept &= rank < top_k
    return torch.empty_like(kept).scatter_(1, ids, kept)
