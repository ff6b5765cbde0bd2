"""Which requests run how many tokens in the next step, and in which cache blocks.

First come, first served. Running rows go first, one new token each or the next chunk of their
prompt; what is left of the token budget goes to waiting requests. A request enters only if its
prompt and one token fit into free blocks, with what the prefix cache holds of it. When blocks run
out, the youngest running request gives its blocks back and waits again at the front; it is
recomputed later from its token ids, so its answer does not change.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from tiercel.cache.allocator import BlockAllocator
from tiercel.cache.prefix import ROOT, PrefixCache, PrefixMatch
from tiercel.engine.request import Request, Status


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request's part of a step.

    Attributes:
        request: whose.
        start: first place that is computed.
        num_query: new tokens, >= 1.
        samples: the step reaches the last token, so it yields the next one.
        enters: the request got its engine row in this step.
    """

    request: Request
    start: int
    num_query: int
    samples: bool
    enters: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step."""

    step_id: int
    scheduled: tuple[ScheduledRow, ...]

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return sum(row.num_query for row in self.scheduled)


class Scheduler:
    """Plans steps over `max_num_seqs` rows and the blocks of one cache group."""

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefix_cache = prefix_cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._step_id = 0

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request that was checked to fit an empty cache."""
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step; None when nothing can run."""
        budget = self.max_num_batched_tokens
        planned: list[ScheduledRow] = []
        # Decode steps before prompt chunks: a long prompt must not stall the others.
        for request in sorted(self.running, key=lambda r: r.num_tokens - r.num_computed > 1):
            if request.status is not Status.RUNNING or budget == 0:
                continue  # it gave way to an older one, or there is no room left
            row = self._plan(request, budget)
            if not self._reserve(request, row.start + row.num_query):
                continue
            planned.append(row)
            budget -= row.num_query
        # A row planned early may have given its blocks to an older prompt since.
        planned = [row for row in planned if row.request.status is Status.RUNNING]
        while budget and self.waiting and self._free_rows:
            request = self.waiting[0]
            match = self._find_prefix(request)
            if not self._can_enter(request, match):
                break
            self._enter(request, match)
            row = replace(self._plan(request, budget), enters=True)
            self._grow(request, row.start + row.num_query)
            planned.append(row)
            budget -= row.num_query
        if not planned:
            return None
        self._step_id += 1
        return SchedulerOutput(self._step_id, tuple(planned))

    def commit(self, row: ScheduledRow, *, is_sound: bool) -> None:
        """Note a computed row; blocks that it filled are kept unless its logits were unsound."""
        request = row.request
        request.num_computed = row.start + row.num_query
        if self.prefix_cache is None or not is_sound:
            return
        size = self.block_size
        while (request.num_linked + 1) * size <= request.num_computed:
            start = request.num_linked * size
            block_id = request.block_ids[request.num_linked]
            tokens = request.tokens(start, start + size)
            request.link = self.prefix_cache.keep(request.link, tokens, block_id)
            request.num_linked += 1

    def discard(self, request: Request) -> list[int]:
        """Forget what a request with unsound logits has kept; the blocks that it alone reads."""
        return [block_id for block_id in request.block_ids if self.allocator.discard(block_id)]

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request in any state and free what it holds."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self._release(request)
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason

    def _plan(self, request: Request, budget: int) -> ScheduledRow:
        missing = request.num_tokens - request.num_computed
        num_query = min(missing, budget)
        return ScheduledRow(request, request.num_computed, num_query, num_query == missing)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _find_prefix(self, request: Request) -> PrefixMatch:
        if self.prefix_cache is None or request.reads_prompt:
            return PrefixMatch((), ROOT)  # a prompt that is read must be computed
        return self.prefix_cache.find(request.tokens(0, request.num_tokens))

    def _can_enter(self, request: Request, match: PrefixMatch) -> bool:
        # One whose prompt alone is asked for never needs more than that.
        most = len(request.prompt_token_ids) + request.max_tokens
        new_blocks = self._blocks_for(min(request.num_tokens + 1, most)) - len(match.block_ids)
        idle_matches = sum(self.allocator.is_idle(block_id) for block_id in match.block_ids)
        return new_blocks <= self.allocator.num_free - idle_matches

    def _enter(self, request: Request, match: PrefixMatch) -> None:
        self.waiting.popleft()
        request.status, request.row = Status.RUNNING, self._free_rows.pop()
        self.running.append(request)
        self.allocator.share(match.block_ids)
        request.block_ids = list(match.block_ids)
        request.link, request.num_linked = match.link, len(match.block_ids)
        request.num_computed = len(match.block_ids) * self.block_size
        if not request.output_token_ids:  # later hits are its own blocks, after a preemption
            request.num_cached = request.num_computed

    def _grow(self, request: Request, num_tokens: int) -> None:
        missing = self._blocks_for(num_tokens) - len(request.block_ids)
        if missing > 0:
            request.block_ids += self.allocator.allocate(missing)

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        """Get blocks for `num_tokens`, of the youngest if need be; False if it gave way."""
        while self._blocks_for(num_tokens) - len(request.block_ids) > self.allocator.num_free:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        self._grow(request, num_tokens)
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.status, request.num_computed = Status.WAITING, 0
        # Its prompt places are read once: what was gathered before is gathered again from the
        # start.
        request.prompt_logprobs.clear()
        request.prompt_logits.clear()
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.allocator.free(request.block_ids)
        self._free_rows.append(request.row)
        request.block_ids, request.row = [], -1
        request.link, request.num_linked = ROOT, 0
