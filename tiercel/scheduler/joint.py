"""One scheduler for each rank, where every rank has requests of its own.

The ranks of data-parallel attention share experts alone: each has rows, a cache and a plan of its
own. Every rank runs all of these schedulers on the same inputs, as ranks do (`ipc/lockstep.py`), so
each knows what all others do in a step without being told. A request belongs to a rank from its
arrival to its end: to the one with the least prompt tokens to compute.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiercel.request.request import Request
from tiercel.scheduler.plan import ScheduledRow, SchedulerOutput
from tiercel.scheduler.scheduler import Scheduler
from tiercel.scheduler.step_budget import Chunk, StepBudget


class JointOutput(SchedulerOutput, frozen=True):
    """The plans of all ranks for one step; `scheduled` has the parts of all of them.

    Attributes:
        by_rank: the plan of each rank; None where it has nothing to do.
    """

    by_rank: tuple[SchedulerOutput | None, ...] = ()

    @property
    def chunks(self) -> list[Chunk]:
        """Those of the rank that has most tokens, for which all others wait."""
        plans = [plan.chunks for plan in self.by_rank if plan is not None]
        return max(plans, key=lambda chunks: sum(chunk.num_tokens for chunk in chunks))


class JointScheduler:
    """The schedulers of all ranks, as one; see `Scheduler` for what is not described here.

    Attributes:
        schedulers: of each rank; all have the same sizes, and one budget.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = schedulers
        self._last_turns = [0] * len(schedulers)
        self._num_added = self._step_id = 0

    @property
    def budget(self) -> StepBudget:
        """Of all ranks: they share it, because they wait for each other."""
        return self.schedulers[0].budget

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs on any rank."""
        return any(scheduler.has_work for scheduler in self.schedulers)

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that fits the empty cache of a rank."""
        return self.schedulers[0].capacity

    @property
    def num_blocks(self) -> int:
        """Blocks of all ranks' caches together."""
        return sum(scheduler.num_blocks for scheduler in self.schedulers)

    @property
    def cache_usage(self) -> float:
        """The mean of all ranks."""
        shares = [scheduler.cache_usage for scheduler in self.schedulers]
        return sum(shares) / len(shares)

    @property
    def num_preemptions(self) -> int:
        """Of all ranks."""
        return sum(scheduler.num_preemptions for scheduler in self.schedulers)

    @property
    def prefix_queries(self) -> int:
        """Of all ranks."""
        return sum(scheduler.prefix_queries for scheduler in self.schedulers)

    @property
    def prefix_hits(self) -> int:
        """Of all ranks."""
        return sum(scheduler.prefix_hits for scheduler in self.schedulers)

    def add(self, request: Request) -> None:
        """Queue a request on the rank that can begin it first."""
        request.rank = self._choose(request)
        self._num_added += 1
        self._last_turns[request.rank] = self._num_added
        self._own(request).add(request)

    def forget_history(self) -> None:
        """See `Scheduler`."""
        for scheduler in self.schedulers:
            scheduler.forget_history()
        self._step_id = 0

    def schedule(self) -> JointOutput | None:
        """Plan the next step of all ranks; None when nothing can run on any."""
        plans = tuple(scheduler.schedule() for scheduler in self.schedulers)
        parts = tuple(part for plan in plans if plan is not None for part in plan.scheduled)
        if not parts:
            return None
        self._step_id += 1
        return JointOutput(self._step_id, parts, (), (), plans)

    def commit(
        self, part: ScheduledRow, *, is_sound: bool, new_token_ids: Sequence[int] = ()
    ) -> None:
        """See `Scheduler`."""
        own = self._own(part.request)
        own.commit(part, is_sound=is_sound, new_token_ids=new_token_ids)

    def withdraw(self, plan: SchedulerOutput) -> None:
        """Take back the plans of all ranks."""
        assert isinstance(plan, JointOutput), "its own"
        for scheduler, own in zip(self.schedulers, plan.by_rank, strict=True):
            if own is not None:
                scheduler.withdraw(own)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """See `Scheduler`."""
        self._own(request).finish(request, reason, stop_reason)

    def _own(self, request: Request) -> Scheduler:
        return self.schedulers[request.rank]

    def _choose(self, request: Request) -> int:
        """The rank of a new request, by the rule for engines (`ipc/routing.py`).

        What is cached need not be guessed here.
        """

        def turn(rank: int) -> tuple[int, int, int, int]:
            scheduler = self.schedulers[rank]
            known = scheduler.known_tokens(request)
            num_requests = len(scheduler.waiting) + len(scheduler.running)
            return scheduler.waiting_tokens - known, -known, num_requests, self._last_turns[rank]

        return min(range(len(self.schedulers)), key=turn)


AnyScheduler = Scheduler | JointScheduler
