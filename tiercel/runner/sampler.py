"""Next tokens from logits, for mixed parameters in one batch, without a look from the host.

Order: grammar masks and bans (padding ids, `allowed_token_ids`, `bad_words`, stop tokens before
`min_tokens`), penalties, `logit_bias`; cuts by top-k, top-p and min-p; then the draw
(`ops/sample_tokens.py`). Each stage runs for the rows that ask for it, whose parameters it reads
from their persistent rows; a row's result depends on its own logits and key only.

A row that verifies drafts has a line of logits behind each of them too. Everything holds there as
if the drafts before it were in the answer already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from tiercel.ops.sample_tokens import SampleRows, draw_torch, sample_tokens
from tiercel.ops.verify_accept import Verified, verify_accept
from tiercel.params import SamplingParams
from tiercel.request.request import Request
from tiercel.runner.penalties import Penalties
from tiercel.runner.row_state import Rows, to_device
from tiercel.runner.sampler_output import DeviceSample, top_logprobs
from tiercel.seeds import mix_key

NEG_INF = float("-inf")
_LEAST = torch.finfo(torch.float32).tiny  # what is smaller may become 0 on its way to the rows


@dataclass(frozen=True, slots=True)
class DraftSlots:
    """How lines of logits belong to R rows of which some verify drafts.

    Attributes:
        starts: (R + 1,) int32, the first line of each.
        num_drafts: (R,) int32, drafts of each; lines behind them are padding.
        widths: on the host, lines of each row that a request fills.
        planned: drafts of each that the plan allows; of a row whose last token the host knows,
            these are the first of `Request.next_drafts`.
    """

    starts: Tensor
    num_drafts: Tensor
    widths: tuple[int, ...]
    planned: tuple[int, ...]


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
        least_chance: float = 0.0,
    ) -> None:
        """Set up.

        Args:
            banned_ids: token ids that no answer may hold (padding of the vocabulary).
            vocab_size: columns of the logits.
            rows: the engine's.
            encode: the token sequences that spell a bad word.
            least_chance: of a draft, to be worth making.
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
        slots: DraftSlots | None = None,
    ) -> DeviceSample:
        """Draw, append and report.

        Args:
            logits: (L, vocab_size) float32, the raw ones; changed in place.
            requests: of the first rows; rows beyond are scratch.
            rows: (R,) int32, engine rows.
            slots: whose lines they are; None: one of each row.
        """
        lines = _Lines(requests, slots)
        asked = tuple(i for i, r in enumerate(requests) if r.params.logprobs is not None)
        is_changed = any(map(_is_changed, requests))
        raw = logits.index_select(0, self._index(lines.of(asked))) if asked else None
        is_sound = None
        if is_changed:
            is_sound = logits.isfinite().all(dim=1).to(torch.uint8)
            self._process(logits, lines, rows)
        state = self._rows.sampling
        if slots is None:
            token_ids, problems = sample_tokens(logits, rows, state, self.is_banned, is_sound)
            sample = DeviceSample(token_ids, problems)
            chosen = token_ids
        else:
            verified = self.accept(logits, rows, slots.starts, slots.num_drafts, is_sound)
            sample = DeviceSample(verified.packed)
            chosen = verified.token_ids
        self._count(lines, rows, chosen, None if slots is None else verified)
        if raw is None:
            return sample
        most = max(requests[i].params.logprobs or 0 for i in asked)
        if slots is None:
            chosen = chosen.index_select(0, self._index(asked))
        else:
            picked = [self._index(part) for part in lines.slots_of(asked)]
            chosen = chosen[picked[0], picked[1]]
        return replace(sample, asked=asked, logprobs=top_logprobs(raw, chosen, most))

    def accept(
        self,
        logits: Tensor,
        rows: Tensor,
        starts: Tensor,
        num_drafts: Tensor,
        is_sound: Tensor | None = None,
    ) -> Verified:
        """Choose, accept and append, of rows with drafts; see `verify_accept`."""
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
            params: of all L; without penalties and edits.
            keys: (L,) int64, see `seeds.py`.
            positions: (L,) int32, of each sampled token in its text.

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
        self, lines: _Lines, rows: Tensor, chosen: Tensor, verified: Verified | None
    ) -> None:
        """Count the new tokens of rows with penalties."""
        penalised = [i for i, r in enumerate(lines.requests) if r.params.has_penalties]
        if not penalised:
            return
        index = self._index(penalised)
        is_new = None
        if verified is not None:
            places = torch.arange(chosen.shape[1], device=rows.device)
            is_new = (places < verified.num_new[index].unsqueeze(1)).int()
        self._penalties.count(rows[index], chosen[index], is_new)

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

    def _process(self, logits: Tensor, lines: _Lines, rows: Tensor) -> None:
        """Apply what requests ask to their lines, in place."""
        requests = lines.requests
        self._mask(logits, lines)
        for i, request in enumerate(requests):
            edits = self._edits.get(request.row)
            if edits is not None:
                self._ban(logits, lines, i, edits)
        penalised = [i for i, r in enumerate(requests) if r.params.has_penalties]
        if penalised:
            index = self._index(lines.of(penalised))
            picked = logits.index_select(0, index)
            penalised_rows = self._rows_of(lines, penalised, rows)
            drafts = self._drafts_before(lines, penalised, penalised_rows)
            logits.index_copy_(0, index, self._penalties.apply(picked, penalised_rows, drafts))
        for i, request in enumerate(requests):
            edits = self._edits.get(request.row)
            if edits is not None and edits.bias_ids is not None and edits.biases is not None:
                own = logits[lines.span(i)]
                own.index_add_(1, edits.bias_ids, edits.biases.expand(len(own), -1))
        cutting = [i for i, r in enumerate(requests) if _is_cut(r.params)]
        if cutting:
            index = self._index(lines.of(cutting))
            picked = logits.index_select(0, index)
            columns = self._cut_columns(self._rows_of(lines, cutting, rows))
            logits.index_copy_(0, index, self._cut(picked, *columns))

    def _rows_of(self, lines: _Lines, numbers: Sequence[int], rows: Tensor) -> Tensor:
        """The engine row of each line of some rows."""
        return rows.index_select(0, self._index(lines.slots_of(numbers)[0]))

    def _drafts_before(
        self, lines: _Lines, numbers: Sequence[int], rows: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """What `Penalties.apply` asks of drafts, for the lines of some rows."""
        if not lines.has_drafts:
            return None
        slots = self._index(lines.slots_of(numbers)[1])
        ids = self._rows.drafts.draft_ids.index_select(0, rows)[:, 1:].long()
        places = torch.arange(ids.shape[1], device=rows.device)
        return ids, (places < slots.unsqueeze(1)).int()

    def _mask(self, logits: Tensor, lines: _Lines) -> None:
        """Ban what the grammars of some requests do not allow next."""
        bound = [(i, r.matcher) for i, r in enumerate(lines.requests) if r.matcher is not None]
        if not bound:
            return
        known = [lines.known_drafts(i) for i, _ in bound]
        words = np.zeros((len(bound) + sum(map(len, known)), -(-self._vocab_size // 32)), np.int32)
        unfilled = iter(words)
        for (_, matcher), drafts in zip(bound, known, strict=True):
            matcher.fill_mask(next(unfilled))
            for draft in drafts:
                matcher.advance(draft)
                matcher.fill_mask(next(unfilled))
            matcher.rollback(len(drafts))
        spans = [lines.span(i) for i, _ in bound]
        index = self._index(
            [
                span.start + slot
                for span, drafts in zip(spans, known, strict=True)
                for slot in range(1 + len(drafts))
            ]
        )
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = (to_device(words, logits.device).unsqueeze(2) >> bits) & 1
        is_allowed = allowed.flatten(1)[:, : self._vocab_size] != 0
        picked = logits.index_select(0, index).masked_fill_(~is_allowed, NEG_INF)
        logits.index_copy_(0, index, picked)

    def _ban(self, logits: Tensor, lines: _Lines, number: int, edits: _Edits) -> None:
        request, span = lines.requests[number], lines.span(number)
        own = logits[span]
        if edits.banned is not None:
            own.masked_fill_(edits.banned, NEG_INF)
        output = request.output_token_ids
        text = [*output, *lines.known_drafts(number)] if edits.bad_words else output
        for slot in range(1 + len(text) - len(output)):
            length = len(output) + slot
            for ids in edits.bad_words:
                # The token that would complete a bad word.
                before = len(ids) - 1
                if before <= length and text[length - before : length] == ids[:-1]:
                    own[slot, ids[-1]].fill_(NEG_INF)  # to assign a number would wait
        if edits.stop_ids is None:
            return
        least = request.params.min_tokens
        if lines.slots is None:
            drawn = len(output) + request.num_ahead - 1  # this step samples too
            if drawn < least:
                own.index_fill_(1, edits.stop_ids, NEG_INF)
        elif len(output) < least:  # else it has drawn enough, whatever is under way
            places = torch.arange(len(own), device=own.device) + self._rows.num_tokens[request.row]
            is_early = places < len(request.prompt_token_ids) + least
            ban = torch.where(is_early, NEG_INF, 0.0).unsqueeze(1)
            own.index_add_(1, edits.stop_ids, ban.expand(-1, len(edits.stop_ids)))

    def _top_k(self, params: SamplingParams) -> int:
        return params.top_k if params.top_k > 0 else self._vocab_size

    def _cut_columns(self, rows: Tensor) -> list[Tensor]:
        """Of some rows: temperature, top-k, top-p and min-p, (rows, 1) each."""
        values = self._rows.values
        columns = (values["temperature"], self._rows.top_k, values["top_p"], values["min_p"])
        return [column.index_select(0, rows).unsqueeze(1) for column in columns]

    def _cut(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> Tensor:
        # Padding of the vocabulary is banned by the draw, too late for shares of what remains.
        logits = logits.masked_fill(self.is_banned.view(torch.bool), NEG_INF)
        kept = is_kept(logits / temperature, top_k, top_p, min_p)
        return logits.masked_fill_(~kept, NEG_INF)


class _Lines:
    """Which lines of logits belong to which of the rows that requests fill, on the host."""

    def __init__(self, requests: Sequence[Request], slots: DraftSlots | None) -> None:
        self.requests = requests
        self.slots = slots
        self._ends = None if slots is None else [0, *accumulate(slots.widths)]
        self.has_drafts = self._ends is not None and self._ends[-1] > len(requests)

    def span(self, number: int) -> slice:
        """The lines of a row."""
        if self._ends is None:
            return slice(number, number + 1)
        return slice(self._ends[number], self._ends[number + 1])

    def known_drafts(self, number: int) -> tuple[int, ...]:
        """The drafts of a row whose last token the host knows."""
        count = 0 if self.slots is None else self.slots.planned[number]
        return self.requests[number].next_drafts[:count]

    def of(self, numbers: Sequence[int]) -> list[int]:
        """The lines of some rows."""
        spans = map(self.span, numbers)
        return list(chain.from_iterable(range(span.start, span.stop) for span in spans))

    def slots_of(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Of each line of some rows: the number of its row, and which of its lines it is."""
        spans = [(i, self.span(i)) for i in numbers]
        pairs = [(i, k) for i, span in spans for k in range(span.stop - span.start)]
        return [i for i, _ in pairs], [k for _, k in pairs]


def _is_cut(params: SamplingParams) -> bool:
    is_cut = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return is_cut and not params.is_greedy


def is_plain(request: Request) -> bool:
    """Whether a request draws from the model's logits as they are, and asks for nothing more."""
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
    # The rounded sum may reach 1 early: top_p = 1 must not cut, whatever a neighbour asks.
    kept = ((before < top_p) | (top_p >= 1.0)) & (probs >= min_p * probs[:, :1])
    kept &= rank < top_k
    return torch.empty_like(kept).scatter_(1, ids, kept)
