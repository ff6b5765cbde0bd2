"""Which requests run how many tokens in the next step, and in which cache blocks.

First come, first served within a priority. Running rows go first, one new token each or the next
chunk of their prompt; the remaining token budget goes to waiting requests. A request enters only if
its prompt and one token fit into free blocks, with what the prefix cache holds of it; of sliding
groups, which free blocks after each step, it needs those of its first step. When blocks run out,
the last running request gives its blocks back and waits again (preemption). It is recomputed later
from its token ids, so its answer does not change.

Steps overlap: the next one is planned while one is under way. Four rules keep this sound:
- A row's length is known up to its bound: every step under way adds its token, and up to as many
  more as it verifies drafts. A stop is found one step late; the row's results of that step are
  dropped.
- A row whose bound has reached its limit waits for the results.
- Only rows with nothing in flight are freed, reused or preempted. A row that must give way first
  sits out a step.
- A request that needs its last token on the host runs only with nothing in flight.

Where drafts are made (`spec/`), a row takes its last token and up to `draft_limit` draft tokens, if
that is worth it for the step as a whole. Rows share the budget that remains after a token of each.
Beside prompts, drafts take half of it, and room stays for the next item. Blocks are reserved for
all drafts; without memory for them a row verifies none and gives way only for its own token.

A request to score has a prompt like any other. The budget that its chunks leave in a step goes to
its items, as many whole ones as fit, from the step on that computes the end of the prompt. Items
hold no blocks, and items whose results are in are never computed again, whatever happens to the
request.

The tokens of a step are bounded by `StepBudget`, on a CPU by the time of its chunks too. An item
that is longer than such a bound ever allows gets a step without other chunks.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence
from dataclasses import replace

from tiercel.cache.manager import BlockWrite, CacheManager
from tiercel.cache.prefix import ROOT, PrefixMatch
from tiercel.config import MAX_DECODE_QUERIES
from tiercel.request.request import Request, Status
from tiercel.scheduler.plan import ScheduledRow, SchedulerOutput
from tiercel.scheduler.step_budget import Chunk, StepBudget, StepRoom
from tiercel.spec.policy import DraftPolicy

# Tokens that are computed even on a hit, so that it gives the bits of a prompt computed whole.
# On a GPU another kernel attends for up to MAX_DECODE_QUERIES of them; on a CPU products of fewer
# rows take other orders of sums (up to 3 rows on one processor, up to 8 on another; ops/linear.py).
LEAST_COMPUTED = MAX_DECODE_QUERIES + 1


def _turn(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


def _take(room: StepRoom, part: ScheduledRow) -> None:
    """Subtract a part from the room of its step."""
    if part.is_chunk:
        room.take_chunk(Chunk(part.start, part.num_tokens))
    else:
        room.num_tokens -= part.num_tokens


def _is_chunk(request: Request) -> bool:
    """Whether a request's next step may take more than one token."""
    return request.score is not None or request.bound - request.num_computed > 1


class Scheduler:
    """Plans steps over `max_num_seqs` rows and the blocks of a cache."""

    def __init__(
        self,
        cache: CacheManager,
        max_num_seqs: int,
        budget: StepBudget,
        least_computed: int = LEAST_COMPUTED,
        policy: DraftPolicy | None = None,
    ) -> None:
        self.cache = cache
        self.policy = policy
        self.budget = budget
        self.least_computed = least_computed
        self.waiting: list[Request] = []  # both in order of turn
        self.running: list[Request] = []
        self.num_preemptions = 0
        # Tokens looked up and found in the prefix cache, of requests when they first enter.
        self.prefix_queries = self.prefix_hits = 0
        self._free_rows = list(range(max_num_seqs))  # a heap: the lowest row is given first
        self._writes: dict[int, list[BlockWrite]] = {}
        self._unsound_blocks: list[list[int]] = [[] for _ in cache.groups]
        self._num_added = 0
        self._step_id = 0
        self._is_verifying = False

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that fits an empty cache."""
        return self.cache.capacity

    @property
    def num_blocks(self) -> int:
        """Blocks of the first group of the cache."""
        return self.cache.allocators[0].num_blocks

    @property
    def cache_usage(self) -> float:
        """Share of the cache that running requests hold."""
        return self.cache.usage

    @property
    def waiting_tokens(self) -> int:
        """Tokens of prompts and items that are to be computed before another request's."""
        return sum(
            max(0, request.num_input_tokens - request.num_computed)
            for request in (*self.waiting, *self.running)
        )

    def known_tokens(self, request: Request) -> int:
        """Tokens at the start of a new request that the prefix cache holds."""
        return self._find_prefix(request).num_blocks * self.cache.block_size

    def add(self, request: Request) -> None:
        """Queue a request that was checked to fit an empty cache."""
        request.arrival = self._num_added
        self._num_added += 1
        insort(self.waiting, request, key=_turn)

    def forget_history(self) -> None:
        """Reset the counts of steps, preemptions and hits; drop prefixes of ended requests."""
        self.cache.forget()
        self._step_id = self.num_preemptions = self.prefix_queries = self.prefix_hits = 0

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step; None when nothing can run."""
        planned: dict[int, ScheduledRow] = {}  # by engine row
        self._is_verifying = self._verifies()
        self._plan_running(planned)
        self._plan_waiting(planned)
        if not planned:
            return None
        for part in planned.values():
            request = part.request
            request.num_in_flight += 1
            request.num_ahead += part.num_ahead
            request.num_computed += part.num_query + part.num_drafts
            request.num_items_planned += len(part.items)
        self._step_id += 1
        writes = [(row, write) for row, every in self._writes.items() for write in every]
        unsound = tuple(map(tuple, self._unsound_blocks))
        self._writes, self._unsound_blocks = {}, [[] for _ in unsound]
        return SchedulerOutput(self._step_id, tuple(planned.values()), tuple(writes), unsound)

    def commit(
        self, part: ScheduledRow, *, is_sound: bool, new_token_ids: Sequence[int] = ()
    ) -> None:
        """Apply a row's finished step; blocks that it filled are kept unless it was unsound.

        Args:
            part: of the step.
            is_sound: whether all values that it computed are finite.
            new_token_ids: the tokens that it yielded; the request does not hold them yet.
        """
        request = part.request
        request.num_in_flight -= 1
        request.num_ahead -= part.num_ahead
        wrong = part.num_ahead - len(new_token_ids) if part.num_drafts else 0
        request.num_computed -= wrong
        request.num_committed += part.num_query + part.num_drafts - wrong
        request.num_items_done += len(part.items)
        request.is_unsound |= not is_sound
        if request.status is Status.FINISHED:
            if request.num_in_flight == 0:
                self._release(request)
            return
        if request.is_unsound:
            return  # it ends now, and its blocks are zeroed together
        self._keep(request, new_token_ids)
        writes = self.cache.trim(request.block_ids, request.num_committed)
        self._writes.setdefault(request.row, []).extend(writes)

    def withdraw(self, plan: SchedulerOutput) -> None:
        """Take back a plan whose results are lost; its requests wait and are computed anew."""
        for part in plan.scheduled:
            request = part.request
            request.num_in_flight -= 1
            request.num_ahead -= part.num_ahead
            if request.num_in_flight:
                continue  # a later plan of the same kind follows
            if request.status is Status.RUNNING:
                self._preempt(request)
            else:
                self._release(request)
        for request in self.running:  # not of this plan, which may yet have had blocks for them
            self._write_table(request)
        for blocks, lost in zip(self._unsound_blocks, plan.unsound_blocks, strict=True):
            blocks += lost

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request in any state; its memory is free once no step under way uses it."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            if request.num_in_flight == 0:
                self._release(request)
        request.status = Status.FINISHED
        request.leader = None
        request.finish_reason, request.stop_reason = reason, stop_reason

    def _plan_running(self, planned: dict[int, ScheduledRow]) -> None:
        sits_out: set[Request] = set()
        num_answers = self._num_answers()
        room = self.budget.open(has_answers=num_answers > 0)
        spare = self._spare_tokens(num_answers)
        # Decode steps before prompt chunks: a long prompt must not stall running answers.
        for number, request in enumerate(sorted(self.running, key=_is_chunk)):
            if room.num_tokens == 0:
                break
            if request.status is not Status.RUNNING or request in sits_out:
                continue  # it gave way to an earlier one
            if not self._may_run(request):
                continue
            # An equal share of the remaining tokens, rounded up: earlier rows leave some for later.
            part = self._plan(request, room, -(-spare // max(1, num_answers - number)))
            if not part.num_tokens:
                continue  # its next chunk or item waits for a step with more room
            if part.num_drafts and not self.cache.can_grow(
                request.block_ids, self._positions(part)
            ):
                part = replace(part, num_drafts=0)
            if self._reserve(request, self._positions(part), planned, sits_out):
                planned[request.row] = part
                _take(room, part)
                spare -= part.num_drafts

    def _num_answers(self) -> int:
        """The number of running requests whose next step takes one token, and drafts."""
        return sum(not _is_chunk(request) for request in self.running)

    def _spare_tokens(self, num_answers: int) -> int:
        """Tokens of a step that drafts may take, so that answers, prompts and items all go on."""
        if not self._is_verifying:
            return 0
        most = self.budget.max_tokens - num_answers
        items = (
            request.score.items[request.num_items_planned]
            for request in self.running
            if request.score is not None and request.num_items_planned < request.num_items
        )
        has_prompts = bool(self.waiting) or num_answers < len(self.running)
        spare = most // 2 if has_prompts else most
        return max(0, min(spare, most - max(map(len, items), default=0)))

    def _plan_waiting(self, planned: dict[int, ScheduledRow]) -> None:
        if not self.waiting:
            return
        room = self.budget.open(has_answers=self._num_answers() > 0)
        for part in planned.values():
            _take(room, part)
        index = 0
        while room.num_tokens > 0 and index < len(self.waiting) and self._free_rows:
            request = self.waiting[index]
            if self._follows(request):
                index += 1
                continue
            match = self._find_prefix(request)
            if self._lead(request, match):
                index += 1
                continue
            if not self._can_enter(request, match, room):
                break
            del self.waiting[index]
            self._enter(request, match)
            part = replace(self._plan(request, room, 0), enters=True)
            self._grow(request, self._positions(part))
            planned[request.row] = part
            _take(room, part)

    def _may_run(self, request: Request) -> bool:
        if request.num_in_flight and request.needs_last_token:
            return False
        if request.score is not None:
            has_items = request.num_items_planned < request.num_items
            return has_items or request.num_computed < len(request.prompt_token_ids)
        sampled = len(request.output_token_ids) + request.num_ahead
        return not request.num_ahead or sampled < request.max_tokens

    def _plan(self, request: Request, room: StepRoom, most_drafts: int) -> ScheduledRow:
        missing, start = request.bound - request.num_computed, request.num_computed
        most = room.for_chunk(start) if _is_chunk(request) else room.num_tokens
        num_query = min(missing, most)
        part = ScheduledRow(request, request.row, start, num_query, num_query == missing)
        if request.score is None:
            return self._with_drafts(part, most_drafts) if self._is_verifying else part
        first = stop = request.num_items_planned
        items = request.score.items  # before the prompt's end no tokens are left for them
        if not missing and first < len(items) and room.has_room_for(len(items[first]), start):
            most = max(most, len(items[first]))
        left = for_items = most - num_query
        while stop < len(items) and len(items[stop]) <= left:
            left -= len(items[stop])
            stop += 1
        return replace(
            part, samples=False, items=range(first, stop), num_item_tokens=for_items - left
        )

    def _positions(self, part: ScheduledRow) -> int:
        """Positions of the cache that a row needs for its part of a step."""
        request, stop = part.request, part.start + part.num_query + part.num_drafts
        if self.policy is None or not (part.samples and request.draft_limit):
            return stop
        end = len(request.prompt_token_ids) + request.max_tokens
        return max(stop, min(stop + self.policy.spare_places, end))

    def _with_drafts(self, part: ScheduledRow, most: int) -> ScheduledRow:
        """The part with as many drafts as the row's limits allow."""
        request = part.request
        left = len(request.prompt_token_ids) + request.max_tokens - request.bound - 1
        count = min(request.draft_limit, left, most)
        is_answer = part.start >= len(request.prompt_token_ids) and part.num_query == 1
        if not (is_answer and part.samples) or count <= 0:
            return part
        if request.needs_last_token:
            count = request.num_fitting(count)
        return replace(part, num_drafts=count)

    def _verifies(self) -> bool:
        """Whether the rows of the next step verify drafts."""
        if self.policy is None:
            return False
        known = [
            (min(len(request.next_drafts), request.draft_limit), request.acceptance)
            for request in self.running
            if request.next_drafts
        ]
        return self.policy.is_worth_verifying(known, len(self.running))

    def _most_cached(self, request: Request) -> int:
        """Tokens of a request that need not be computed if the cache holds them."""
        if request.num_items:  # no logits of its last token are read
            return request.num_tokens
        return request.num_tokens - self.least_computed

    def _find_prefix(self, request: Request) -> PrefixMatch:
        if request.reads_prompt:
            return self.cache.find(())  # a prompt that is read must be computed
        # The last token is never looked up.
        return self.cache.find([*request.tokens(0, self._most_cached(request)), -1])

    def _follows(self, request: Request) -> bool:
        """Whether the request still waits for another one to compute the start they share."""
        leader = request.leader
        if leader is None:
            return False
        if leader.status is Status.RUNNING and leader.num_prefix_blocks < request.leader_blocks:
            return True
        request.leader = None
        return False

    def _lead(self, request: Request, match: PrefixMatch) -> bool:
        """Find a running request that computes the very next block right now, to wait for it."""
        size = self.cache.block_size
        if not self.cache.keeps_prefixes or request.reads_prompt:
            return False
        for other in self.running:
            if other.parent_key != match.parent_key or other.num_prefix_blocks != match.num_blocks:
                continue
            most = min(self._most_cached(request) // size, other.num_tokens // size)
            shared = match.num_blocks
            while shared < most and request.tokens(shared * size, (shared + 1) * size) == (
                other.tokens(shared * size, (shared + 1) * size)
            ):
                shared += 1
            if shared > match.num_blocks:
                request.leader, request.leader_blocks = other, shared
                return True
        return False

    def _can_enter(self, request: Request, match: PrefixMatch, room: StepRoom) -> bool:
        start = match.num_blocks * self.cache.block_size
        if request.score is not None and start == request.num_tokens:
            item = request.score.items[request.num_items_planned]
            if not room.has_room_for(len(item), start):
                return False  # it would have nothing to do in this step
        elif not room.for_chunk(start):
            return False
        # A request for its prompt alone never needs more than that.
        most = len(request.prompt_token_ids) + request.max_tokens
        spare = 0 if self.policy is None else self.policy.spare_places
        num_tokens = min(request.num_tokens + 1 + spare, most)
        first = min(request.num_tokens, start + room.for_chunk(start))
        return self.cache.can_enter(num_tokens, min(first + spare, num_tokens), match)

    def _enter(self, request: Request, match: PrefixMatch) -> None:
        request.status, request.row = Status.RUNNING, heapq.heappop(self._free_rows)
        insort(self.running, request, key=_turn)
        request.block_ids = self.cache.enter(match)
        request.parent_key, request.num_prefix_blocks = match.parent_key, match.num_blocks
        request.num_computed = request.num_committed = match.num_blocks * self.cache.block_size
        self._write_table(request)
        has_begun = bool(request.output_token_ids) or request.num_items_done > 0
        if not has_begun:  # later hits are its own blocks, after a preemption
            request.num_cached = request.num_computed
            self.prefix_queries += request.num_tokens
            self.prefix_hits += request.num_computed

    def _write_table(self, request: Request) -> None:
        """Let the next plan write all blocks of a row."""
        self._writes[request.row] = [
            BlockWrite(group, 0, tuple(ids)) for group, ids in enumerate(request.block_ids) if ids
        ]

    def _grow(self, request: Request, num_tokens: int) -> None:
        writes = self.cache.grow(request.block_ids, num_tokens)
        self._writes.setdefault(request.row, []).extend(writes)

    def _reserve(
        self,
        request: Request,
        num_tokens: int,
        planned: dict[int, ScheduledRow],
        sits_out: set[Request],
    ) -> bool:
        """Take blocks for `num_tokens`, from the last request if need be; False if it must wait."""
        while not self.cache.can_grow(request.block_ids, num_tokens):
            last = self.running[-1]
            planned.pop(last.row, None)
            if last.num_in_flight:
                sits_out.add(last)
                return False
            self._preempt(last)
            if last is request:
                return False
        self._grow(request, num_tokens)
        return True

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self.running.remove(request)
        self._release(request)
        request.status = Status.WAITING
        # Its prompt positions are read once: values gathered before are gathered again from the
        # start.
        request.prompt_logprobs.clear()
        request.prompt_logits.clear()
        request.embedding = None
        insort(self.waiting, request, key=_turn)

    def _release(self, request: Request) -> None:
        if request.is_unsound or request.has_unsound_draft:
            # NaN in a block would reach its next owner: unseen slots are multiplied by 0.
            for blocks, alone in zip(
                self._unsound_blocks, self.cache.discard(request.block_ids), strict=True
            ):
                blocks += alone
        self.cache.release(request.block_ids)
        self._writes.pop(request.row, None)
        heapq.heappush(self._free_rows, request.row)
        request.block_ids, request.row = [], -1
        request.num_computed = request.num_committed = 0
        request.next_drafts = ()
        request.num_items_planned = request.num_items_done
        request.parent_key, request.num_prefix_blocks = ROOT, 0

    def _keep(self, request: Request, new_token_ids: Sequence[int]) -> None:
        """Keep the blocks that are full of committed tokens for other requests."""
        size = self.cache.block_size
        while (request.num_prefix_blocks + 1) * size <= request.num_committed:
            start = request.num_prefix_blocks * size
            known = request.tokens(start, start + size)
            first = start + len(known) - request.num_tokens  # a step may fill several blocks
            tokens = (*known, *new_token_ids[first : first + size - len(known)])
            request.parent_key = self.cache.keep(
                request.parent_key, tokens, request.block_ids, request.num_prefix_blocks
            )
            request.num_prefix_blocks += 1
