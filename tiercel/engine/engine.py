"""The loop: admit, schedule, launch, collect, emit.

A step is planned and enqueued while the one before it runs: the device holds one queued step, and
the host works on results meanwhile. On a CPU a launch runs to its end, so overlap gains nothing;
there each step is collected immediately, in the same loop.

Of several ranks each runs this loop on the same inputs (`ipc/lockstep.py`), so nothing here may
depend on a clock, on memory or on what happened to one process alone: a step that one of them does
not finish is an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from time import perf_counter

import numpy as np
import torch
from msgspec import Struct

from tiercel.engine.interrupts import allowed
from tiercel.engine_config import EngineConfig
from tiercel.errors import InvalidRequestError, OutOfMemoryError
from tiercel.grammar.matcher import TOO_COMPLEX
from tiercel.request.request import Request, Status
from tiercel.runner.runner import Launch, ModelRunner
from tiercel.runner.sampler_output import SampledTokens
from tiercel.scheduler.joint import AnyScheduler
from tiercel.scheduler.plan import SchedulerOutput
from tiercel.spec.counts import DraftCounts
from tiercel.spec.policy import INITIAL_ACCEPTANCE, update_acceptance


class RequestUpdate(Struct, frozen=True):
    """The new tokens of one request in one step; the request itself says whether it finished."""

    request: Request
    new_token_ids: tuple[int, ...]


class Engine:
    """Runs requests together over one model and one cache.

    Attributes:
        scheduler: plans its steps.
        runner: runs them.
        config: resolved.
        draft_counts: counts of drafts since `forget`.
        late: requests whose masks took too long; they end before the next step.
    """

    def __init__(
        self,
        scheduler: AnyScheduler,
        runner: ModelRunner,
        config: EngineConfig,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Set up.

        Args:
            scheduler: plans its steps.
            runner: runs them.
            config: resolved.
            clock: seconds, by which steps are timed.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.config = config
        self.draft_counts = DraftCounts()
        self._clock = clock
        self._pending: deque[tuple[SchedulerOutput, Launch | None]] = deque()
        self.late: list[Request] = []
        self._is_alone = config.tensor_parallel_size == 1

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work or bool(self._pending)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            OutOfMemoryError: it could never fit the cache.
            InvalidRequestError: an item to score could never fit a step, or the model packs none.
        """
        if request.num_items and not self.config.packs_items:
            raise InvalidRequestError(
                "this model computes no items after a shared prompt.",
                hint="Put each item into a prompt of its own.",
            )
        longest = max(map(len, request.score.items), default=0) if request.score else 0
        if longest > self.config.max_num_batched_tokens:
            raise InvalidRequestError(
                f"an item has {longest} tokens but a step holds "
                f"{self.config.max_num_batched_tokens}.",
                hint="Put it into a prompt of its own.",
            )
        limit = self.scheduler.capacity
        needed = len(request.prompt_token_ids) + request.max_tokens
        if needed > limit:
            raise OutOfMemoryError(
                f"prompt and answer need {needed} tokens of cache but it holds {limit}.",
                hint="Lower max_tokens or shorten the prompt.",
            )
        if request.max_tokens:
            asked = request.params.num_spec_tokens
            most = self.config.spec.max_drafts
            request.draft_limit = most if asked is None else min(most, asked)
            request.acceptance = INITIAL_ACCEPTANCE
        self.scheduler.add(request)

    def run_scratch(self, query_lens: Sequence[int]) -> None:
        """Launch a step that belongs to no request; see `ModelRunner.run_scratch`."""
        self.runner.run_scratch(query_lens)

    def forget(self) -> None:
        """Reset all counters, and drop the cached blocks of requests that have ended."""
        self.scheduler.forget_history()
        self.draft_counts = DraftCounts()

    def abort(self, request: Request) -> None:
        """End a request in any state; nothing happens if it has finished."""
        self.scheduler.finish(request, "abort")
        self._drain_unless_busy()

    def stop(self, request: Request, stop_reason: str) -> None:
        """End a request whose text reached a stop string."""
        if request.status is Status.FINISHED:
            # Its last token ended it too. The string decides, because the text is cut there.
            request.finish_reason, request.stop_reason = "stop", stop_reason
            return
        self.scheduler.finish(request, "stop", stop_reason)
        self._drain_unless_busy()

    def step(self) -> list[RequestUpdate]:
        """Enqueue one step, and return the updates of the step before it.

        Without overlap these are the updates of the same step. The result is empty while the first
        of two overlapping steps is under way.
        """
        is_done = False
        try:
            updates = self._step()
            is_done = True
        finally:
            if not is_done:  # interrupted, or an error
                self._abandon()
        return updates

    def _step(self) -> list[RequestUpdate]:
        updates = self._end_late()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._pending.append((plan, None))
            started_s = self._clock()
            try:
                with self._interruptible():
                    launch = self._launch(plan)
                self._pending[-1] = plan, launch
                if self.scheduler.budget.is_timed:  # on a CPU: a launch runs the step to its end
                    self.scheduler.budget.learn(plan.chunks, self._clock() - started_s)
            except torch.OutOfMemoryError:
                if not self._is_alone:  # the others have memory, and go on
                    raise
                updates += self._survive()
        assert plan or self._pending or not self.has_work, "submit admits only what fits"
        ahead = 1 if plan is not None and self.config.overlap else 0
        while len(self._pending) > ahead:
            updates += self._collect()
        self._drain_unless_busy(updates)
        return updates

    def _interruptible(self) -> AbstractContextManager[None]:
        """Let Ctrl-C through while nothing is half done here, nor a step done by other ranks."""
        return allowed() if self._is_alone else nullcontext()

    def _end_late(self) -> list[RequestUpdate]:
        """End the requests whose masks took too long."""
        late = [request for request in self.late if request.status is not Status.FINISHED]
        self.late.clear()
        for request in late:
            self.scheduler.finish(request, "error", TOO_COMPLEX)
        return [RequestUpdate(request, ()) for request in late]

    def _abandon(self) -> None:
        """Forget the steps under way; their requests wait again and are computed anew."""
        for plan, _ in self._pending:
            self.scheduler.withdraw(plan)
        self._pending.clear()
        self.runner.rows.forget_staged()

    def _launch(self, plan: SchedulerOutput) -> Launch:
        if not self.config.sync_debug:
            return self.runner.launch(plan)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self.runner.launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _survive(self) -> list[RequestUpdate]:
        """After a launch ran out of memory: fail its newest request, begin all others anew."""
        plan, _ = self._pending.pop()
        updates: list[RequestUpdate] = []
        while self._pending:
            updates += self._collect()
        self._pending.append((plan, None))
        self._abandon()
        torch.cuda.empty_cache()
        alive = (part.request for part in plan.scheduled)
        newest = max(
            (request for request in alive if request.status is not Status.FINISHED),
            key=lambda request: request.arrival,
            default=None,
        )
        if newest is not None:
            self.scheduler.finish(newest, "error", OutOfMemoryError.code)
            updates.append(RequestUpdate(newest, ()))
        return updates

    def _drain_unless_busy(self, updates: list[RequestUpdate] | None = None) -> None:
        """Collect the steps under way if no request waits or runs, so that all blocks are free."""
        while self._pending and not self.scheduler.has_work:
            late = self._collect()
            assert updates is not None or not late, "their requests have finished"
            if updates is not None:
                updates += late

    def _collect(self) -> list[RequestUpdate]:
        """Wait for the oldest step under way and apply its results."""
        plan, launch = self._pending[0]
        assert launch is not None, "only launched steps are collected"
        with self._interruptible():
            sampled = self.runner.collect(launch)
        self._pending.popleft()
        alive = {p.request for p in plan.scheduled if p.request.status is Status.RUNNING}
        updates: list[RequestUpdate | None] = []
        for part in plan.scheduled:
            request, result = part.request, sampled.get(part.request)
            is_sound = result is None or result.problem is None
            kept = _cut_at_end(request, result.token_ids) if result and is_sound else ()
            if result is not None and request.draft_limit:
                self._note_drafts(request, result, kept if request in alive else None)
            self.scheduler.commit(part, is_sound=is_sound, new_token_ids=kept)
            if request not in alive:
                continue  # it ended while this step ran
            if result is not None:
                updates.append(self._apply(request, result, kept))
            elif part.has_scores:
                updates.append(self._end_scoring(request))
        return [update for update in updates if update is not None]

    def _note_drafts(
        self, request: Request, result: SampledTokens, kept: tuple[int, ...] | None
    ) -> None:
        """Count drafts and update acceptance; `kept`: the tokens kept, None for an ended row."""
        request.has_unsound_draft |= result.has_unsound_draft
        request.next_drafts = result.next_drafts
        num_accepted = len(result.token_ids) - 1
        if kept is not None:
            num_trimmed = len(result.token_ids) - len(kept)
            self.draft_counts.add(result.num_drafts, num_accepted, num_trimmed)
        if result.num_drafts:
            request.acceptance = update_acceptance(
                request.acceptance, result.num_drafts, num_accepted
            )

    def _end_scoring(self, request: Request) -> RequestUpdate | None:
        """End a request whose last values are in, or one of whose values is NaN."""
        if request.is_unsound:
            self.scheduler.finish(request, "error", "nonfinite_logits")
        elif request.num_items_done == request.num_items:
            self.scheduler.finish(request, "length")
        else:
            return None
        return RequestUpdate(request, ())

    def _apply(
        self, request: Request, result: SampledTokens, new_token_ids: tuple[int, ...]
    ) -> RequestUpdate:
        """Give a request its sampled tokens, the last of which may end it."""
        problem = result.problem
        if request.matcher is not None and request.max_tokens:
            for token_id in new_token_ids:
                request.matcher.advance(token_id)
            problem = problem or request.matcher.error
            if request.matcher.is_late:
                self.late.append(request)
        problem = problem or _prompt_problem(request)
        if problem is not None:
            request.is_unsound = True
            self.scheduler.finish(request, "error", problem)
            return RequestUpdate(request, ())
        if request.max_tokens == 0:  # nothing is generated after its prompt
            if request.pooling == "mean":
                assert request.embedding is not None, "its prompt is computed"
                request.embedding = request.embedding / np.float32(len(request.prompt_token_ids))
            self.scheduler.finish(request, "length")
            return RequestUpdate(request, ())
        request.output_token_ids += new_token_ids
        request.logprobs += result.logprobs[: len(new_token_ids)]
        if new_token_ids[-1] in request.stop_ids:
            self.scheduler.finish(request, "stop", new_token_ids[-1])
        elif len(request.output_token_ids) >= request.max_tokens:
            self.scheduler.finish(request, "length")
        return RequestUpdate(request, new_token_ids)


def _cut_at_end(request: Request, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The new tokens that belong to an answer: those up to a stop token."""
    for count, token_id in enumerate(token_ids, 1):
        if token_id in request.stop_ids:
            return token_ids[:count]
    return token_ids


def _prompt_problem(request: Request) -> str | None:
    """The problem with log-probabilities of a prompt, if any; checked once all of them are in."""
    if request.output_token_ids or all(isfinite(e.logprob) for e in request.prompt_logprobs):
        return None
    return "nonfinite_logits"
