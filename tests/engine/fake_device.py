"""A device for the engine's loop that lags as far behind as it may, and checks what it is told.

It keeps rows, block tables and caches of its own, fed by plans alone, and runs a step only when its
results are collected. A step writes its tokens where the tables say and draws the next token from
what it reads back; the value of an item to score is the draw after the prompt that it reads back
and the item. So a block that two requests share, one that was given away too early, or a token that
was never computed changes an answer.

Rows that draft get guesses after each draw, right ones and wrong ones, written into the cache like
all tokens; only this device knows how long such a row is.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from dataclasses import dataclass, field

import torch

from tiercel.cache.allocator import NULL_BLOCK
from tiercel.request.request import Request, Status, TokenLogprobs
from tiercel.runner.sampler_output import SampledTokens
from tiercel.runner.score_readback import ScoreReadback

VOCAB_SIZE = 13
POISON = -1  # what a step with unsound logits leaves in the cache


def next_token(tokens, window):
    """The next token: of all tokens through the full group, of the last through the sliding one."""
    seen = bytes(tokens) + (b"|" + bytes(tokens[-window:]) if window else b"")
    return zlib.crc32(seen) % VOCAB_SIZE


@dataclass
class _Part:
    request: Request
    row: int
    start: int
    num_query: int
    samples: bool
    num_drafts: int
    entering: list[int] | None
    draw: int
    items: range
    has_scores: bool


@dataclass
class _Step:
    parts: list[_Part]
    new_blocks: tuple
    unsound_blocks: tuple
    result: dict[Request, SampledTokens] | None = None
    scores: list[ScoreReadback] = field(default_factory=list)


@dataclass
class FakeRunner:
    """Stands in for `ModelRunner`."""

    cache: object
    max_num_seqs: int
    budget: int
    fails_at: dict[str, int | None] = field(default_factory=dict)
    row_tokens: dict[int, list[int]] = field(default_factory=dict)
    tables: dict[tuple[int, int, int], int] = field(default_factory=dict)
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    bad_rows: set[int] = field(default_factory=set)
    queue: deque[_Step] = field(default_factory=deque)
    num_draws: dict[str, int] = field(default_factory=dict)
    num_items_run: dict[str, int] = field(default_factory=dict)
    num_hits: int = 0
    num_chunks: int = 0
    most_pending: int = 0
    memory_errors: set[int] = field(default_factory=set)
    row_drafts: dict[int, list[int]] = field(default_factory=dict)
    guess: random.Random = field(default_factory=lambda: random.Random(0))
    stained_rows: set[int] = field(default_factory=set)
    num_right: int = 0
    num_wrong: int = 0

    def launch(self, plan):
        parts = plan.scheduled
        assert parts, "an empty plan"
        assert plan.num_tokens <= self.budget
        assert len({part.row for part in parts}) == len(parts), "a row twice"
        if plan.step_id in self.memory_errors:
            raise torch.OutOfMemoryError
        step = _Step([self._note(part) for part in parts], plan.new_blocks, plan.unsound_blocks)
        self.queue.append(step)
        self.most_pending = max(self.most_pending, len(self.queue))
        for pending in self.queue:
            for part in pending.parts:
                assert part.request.row == part.row, "a row was given away under a step"
        return step

    def _note(self, part):
        request, stop = part.request, part.start + part.num_query
        assert request.status is Status.RUNNING
        assert 0 <= part.row == request.row < self.max_num_seqs
        assert part.num_tokens >= 1
        assert part.num_query >= 1 or part.items
        assert stop + part.num_drafts <= request.bound - part.samples
        assert part.num_drafts <= request.draft_limit
        self.num_hits += part.enters and part.start > 0
        self.num_chunks += not part.samples and not part.has_scores
        if part.items:
            assert stop == len(request.prompt_token_ids), "items without their whole prompt"
            lengths = [len(request.score.items[i]) for i in part.items]
            assert sum(lengths) == part.num_item_tokens
            run = self.num_items_run.get(request.request_id, 0)
            self.num_items_run[request.request_id] = run + len(part.items)
        # Where the row really begins is known here alone, but not before what is committed.
        first, last = request.num_committed, stop + part.num_drafts
        blocks = range(first // self.cache.block_size, -(-last // self.cache.block_size))
        for allocator, held in zip(self.cache.allocators, request.block_ids, strict=True):
            for index in blocks:
                assert held[index] != NULL_BLOCK, "no place to write"
                assert allocator._references[held[index]] == 1, "a shared block is written"
        draw = self.num_draws.get(request.request_id, 0)
        if part.samples or part.has_scores:
            self.num_draws[request.request_id] = draw + 1
        entering = request.tokens(0, request.num_tokens) if part.enters else None
        return _Part(
            request, part.row, part.start, part.num_query, part.samples, part.num_drafts,
            entering, draw, part.items, part.has_scores,
        )  # fmt: skip

    def collect(self, step):
        while step.result is None:
            self._execute(self.queue.popleft())
        for piece in step.scores:
            piece.deliver()
        return step.result

    def _execute(self, step):
        size = self.cache.block_size
        for row, write in step.new_blocks:
            for i, block in enumerate(write.block_ids):
                self.tables[write.group, row, write.start + i] = block
        for group, blocks in enumerate(step.unsound_blocks):
            for block in blocks:
                for offset in range(size):
                    self.slots.pop((group, block * size + offset), None)
        step.result = {}
        for part in step.parts:
            self._enter(part)
            yields = part.samples or part.has_scores
            if yields and self.fails_at.get(part.request.request_id) == part.draw:
                self.bad_rows.add(part.row)  # NaN spreads to all that reads it
            drafts = self.row_drafts.get(part.row, [])[: part.num_drafts]
            self._compute(part, drafts)
            if part.samples:
                step.result[part.request] = self._draw(part, drafts)
            if part.has_scores:
                step.scores.append(self._score(part))

    def _enter(self, part):
        if part.entering is not None:
            self.row_tokens[part.row] = list(part.entering)
            self.row_drafts[part.row] = []
            self.bad_rows.discard(part.row)
            self.stained_rows.discard(part.row)

    def _compute(self, part, drafts):
        request, size = part.request, self.cache.block_size
        tokens = self.row_tokens[part.row] + drafts
        is_bad = part.row in self.bad_rows
        if part.samples and part.num_query == 1:
            part.start = len(self.row_tokens[part.row]) - 1  # the plan knows a bound of it
        for place in range(part.start, part.start + part.num_query + len(drafts)):
            for group in range(len(self.cache.groups)):
                block = self.tables[group, part.row, place // size]
                assert block != NULL_BLOCK
                # A row writes places twice: after NaN, and where drafts were wrong.
                if place % size == 0 and not is_bad and part.row not in self.stained_rows:
                    stale = [self.slots.get((group, block * size + i)) for i in range(size)]
                    assert POISON not in stale, "a block with NaN was given away"
                value = POISON if is_bad else tokens[place]
                self.slots[group, block * size + place % size] = value
        if request.params.prompt_logprobs is not None:
            following = request.prompt_token_ids[part.start + 1 : part.start + part.num_query + 1]
            request.prompt_logprobs += [TokenLogprobs(i, -1.0, ()) for i in following]

    def _score(self, part):
        request, task = part.request, part.request.score
        items = [task.items[i] for i in part.items] or [()]
        values = [float("nan")] * len(items)
        if part.row not in self.bad_rows:
            values = [float(self._next(part, item)) for item in items]
        return ScoreReadback(request, task.num_values(part.items.start), torch.tensor(values))

    def _draw(self, part, drafts):
        if part.row in self.bad_rows:
            return SampledTokens((0,), "nonfinite_logits", num_drafts=len(drafts))
        new = []
        for guess in [*drafts, None]:
            new.append(self._next(part, (), len(new)))
            if new[-1] != guess:
                break
        self.row_tokens[part.row] += new
        self.num_right += len(new) - 1
        self.num_wrong += len(drafts) - (len(new) - 1)
        wrong = range(part.start + len(new), part.start + 1 + len(drafts))
        is_stained = bool(wrong) and self.guess.random() < 0.2
        if is_stained:  # a wrong draft left NaN
            self.stained_rows.add(part.row)
            for place in wrong:
                self._stain(part.row, place)
        made = self._guess(part)
        self.row_drafts[part.row] = made
        return SampledTokens(
            tuple(new),
            num_drafts=len(drafts),
            next_drafts=tuple(made),
            has_unsound_draft=is_stained,
        )

    def _stain(self, row, place):
        size = self.cache.block_size
        for group in range(len(self.cache.groups)):
            block = self.tables[group, row, place // size]
            self.slots[group, block * size + place % size] = POISON

    def _guess(self, part):
        """Guesses after a row's text: right ones at first, then anything."""
        window = next((blocks.window for blocks in self.cache.groups if blocks.window), 0)
        text, made = list(self.row_tokens[part.row]), []
        for _ in range(self.guess.randint(0, part.request.draft_limit)):
            is_right = self.guess.random() < 0.7
            made.append(next_token(text, window) if is_right else self.guess.randrange(VOCAB_SIZE))
            text.append(made[-1])
        return made

    def _next(self, part, item, num_drafts=0):
        size, prefix = self.cache.block_size, part.start + part.num_query + num_drafts
        length = prefix + len(item)
        contexts = []
        for group, blocks in enumerate(self.cache.groups):
            first = max(0, length - blocks.window) if blocks.window else 0
            places = range(first, prefix)
            slot = [self.tables[group, part.row, i // size] * size + i % size for i in places]
            behind = item[max(0, first - prefix) :]
            contexts.append([*(self.slots[group, i] for i in slot), *behind])
        return zlib.crc32(b"|".join(map(bytes, contexts))) % VOCAB_SIZE

    @property
    def rows(self):
        """Where the loop drops staged writes; this device has none."""
        return self

    def forget_staged(self):
        """Nothing is staged here."""
