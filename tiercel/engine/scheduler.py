"""Which requests run how many tokens in the next step, and in which cache blocks.

First come, first served. Running rows go first, one new token each or the next chunk of their
prompt; what is left of the token budget goes to waiting requests. A request enters only if its
prompt and one token fit into free blocks. When blocks run out, the youngest running request gives
its blocks back and waits again at the front; it is recomputed later from its token ids, so its
answer does not change.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tiercel.cache.allocator import BlockAllocator
from tiercel.engine.request import Request, Status


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request's part of a step.

    Attributes:
        request: whose.
        start: first place that is computed.
        num_query: new tokens, >= 1.
        samples: the step reaches the last token, so it yields the next one.
    """

    request: Request
    start: int
    num_query: int
    samples: bool


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
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
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
        while budget and self.waiting and self._free_rows and self._can_enter(self.waiting[0]):
            request = self.waiting.popleft()
            request.status, request.row = Status.RUNNING, self._free_rows.pop()
            self.running.append(request)
            row = self._plan(request, budget)
            self._grow(request, row.start + row.num_query)
            planned.append(row)
            budget -= row.num_query
        if not planned:
            return None
        self._step_id += 1
        return SchedulerOutput(self._step_id, tuple(planned))

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

    def _can_enter(self, request: Request) -> bool:
        # One whose prompt alone is asked for never needs more than that.
        most = len(request.prompt_token_ids) + request.max_tokens
        return self._blocks_for(min(request.num_tokens + 1, most)) <= self.allocator.num_free

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
