"""Ranks in lockstep: every rank runs the same loop on the same inputs.

A plan holds requests, which do not travel. So rank 0 sends what changes its engine from outside
(new requests and their ends), in order, and before each of its steps the word to run it. Scheduler,
cache manager and sampler then decide alike everywhere: they read counters, token ids and lengths.
What could tell ranks apart is decided by rank 0 or agreed on:

    order of requests          by the order of messages; `arrival` is counted
    order of sets              none is iterated where it matters; stop ids are sorted
    time of steps              `StepBudget.pace` of rank 0 comes with each step
    time of a grammar's mask   only rank 0 reads the clock; the requests that are late end with the
                               next step, everywhere
    compiling grammars         rank 0 alone refuses one for its time
    memory                     the least of all ranks sizes the cache and permits dense copies
    costs of drafts            those of rank 0
    options, files, device     those of rank 0, compared before weights are read (`facts_of`)
    seeds                      chosen before a request is sent
    running out of memory,     end the engine: the other ranks have done what one has not
    Ctrl-C within a step
    faults on demand           count the same steps; those of one rank alone end the engine

Where ranks have requests of their own (data-parallel attention), that holds too: every rank plans
for all, computes its own rows, and gets the results of the others when a step is collected
(`runner/joint_runner.py`). The clock of a request's rank then decides whether its mask is late.

The message of a step leaves while the step before it runs on the device, and another rank only
waits for it where it has nothing left to enqueue. A check word over all sampled ids shows when
ranks have come apart all the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, Protocol

from tiercel.engine.engine import Engine, RequestUpdate
from tiercel.engine_config import EngineConfig
from tiercel.errors import EngineDeadError
from tiercel.faults import Faults
from tiercel.grammar.matcher import GrammarMatcher
from tiercel.grammar.matchers import Matchers
from tiercel.grammar.spec import GrammarSpec
from tiercel.ipc.messages import Abort, Forget, NewRequest, Stop
from tiercel.ipc.rank_messages import Begin, Event, Prepare, Scratch, Step, encode_frame
from tiercel.request.request import Request
from tiercel.runner.runner import ModelRunner
from tiercel.scheduler.joint import AnyScheduler
from tiercel.text.tokenizer import Tokenizer

WORD_STEPS: Final = 64  # between two comparisons of check words
MOST_SPARES: Final = 64  # matchers that are kept for requests that may not come


class Audience(Protocol):
    """The other ranks, as the engine of rank 0 speaks to them."""

    @property
    def failure(self) -> EngineDeadError | None:
        """Why there are no other ranks any more; None while there are."""

    def send(self, frames: bytes) -> None:
        """Send frames to all of them; nothing happens after a failure."""

    def note_step(self) -> None:
        """A step was sent: from now on they must advance."""

    def note_word(self, rank: int, num_steps: int, word: int) -> None:
        """Compare a check word with those of other ranks."""

    def give_up(self, error: BaseException) -> None:
        """End them: rank 0 has not finished a step.

        Raises:
            EngineDeadError: because another rank had failed before.
        """


class CheckWord:
    """A word over everything that steps yielded: equal on ranks that computed the same."""

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        """Set up; `tell` gets (steps, word) every `WORD_STEPS` steps."""
        self._tell = tell
        self._word = self._num_steps = 0

    def add(self, scheduler: AnyScheduler, updates: Sequence[RequestUpdate]) -> None:
        """Add the results of a step."""
        # Hashes of integers, and of tuples of them, are the same in every process.
        ids = [hash((update.request.arrival, update.new_token_ids)) for update in updates]
        self._word = hash((self._word, scheduler.num_preemptions, scheduler.prefix_hits, *ids))
        self._num_steps += 1
        if self._num_steps % WORD_STEPS == 0:
            self._tell(self._num_steps, self._word)


class LeadingEngine(Engine):
    """The engine of rank 0: it lets the other ranks do what it does."""

    def __init__(
        self, scheduler: AnyScheduler, runner: ModelRunner, config: EngineConfig, ranks: Audience
    ) -> None:
        super().__init__(scheduler, runner, config)
        self._ranks = ranks
        self._outbox = bytearray()
        self._num_requests = 0
        self._keys: dict[Request, int] = {}
        self._check_word = CheckWord(lambda steps, word: ranks.note_word(0, steps, word))

    def submit(self, request: Request) -> None:
        """Queue a request on all ranks; see `Engine`.

        Raises:
            EngineDeadError: another rank has failed.
        """
        self._check()
        super().submit(request)
        self._num_requests += 1
        self._keys[request] = self._num_requests
        self._tell(NewRequest.of(self._num_requests, request))

    def run_scratch(self, query_lens: Sequence[int]) -> None:
        """See `Engine`."""
        self._tell(Scratch(tuple(query_lens)))
        self._flush()
        super().run_scratch(query_lens)

    def forget(self) -> None:
        """See `Engine`."""
        super().forget()
        self._tell(Forget())
        self._flush()

    def abort(self, request: Request) -> None:
        """See `Engine`."""
        key = self._keys.pop(request, None)
        self._leave_lost_steps()
        if key is not None:
            self._tell_now(Abort(key))
        with self._together():
            super().abort(request)

    def stop(self, request: Request, stop_reason: str) -> None:
        """See `Engine`."""
        key = self._keys.pop(request, None)
        self._leave_lost_steps()
        if key is not None:
            self._tell_now(Stop(key, stop_reason))
        with self._together():
            super().stop(request, stop_reason)

    def step(self) -> list[RequestUpdate]:
        """See `Engine`.

        Raises:
            EngineDeadError: another rank has failed.
        """
        self._check()
        budget = self.scheduler.budget
        late = tuple(self._keys[request] for request in self.late if request in self._keys)
        self._tell(Step(late, budget.pace if budget.is_timed else None))
        self._flush()
        self._ranks.note_step()
        with self._together():
            updates = super().step()
        for update in updates:
            if update.request.finish_reason is not None:
                self._keys.pop(update.request, None)
        self._check_word.add(self.scheduler, updates)
        return updates

    def _tell(self, event: Event) -> None:
        """Let the other ranks know with the next step, or now if there will be none."""
        self._outbox += encode_frame(event)
        if not self.has_work:
            self._flush()

    def _tell_now(self, event: Event) -> None:
        """Let the other ranks know before this one acts: it may wait for their results."""
        self._outbox += encode_frame(event)
        self._flush()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """End all ranks where this one does not finish what the others do too."""
        try:
            yield
        except BaseException as error:
            self._ranks.give_up(error)
            raise

    def _flush(self) -> None:
        if self._outbox:
            self._ranks.send(bytes(self._outbox))
            self._outbox.clear()

    def _check(self) -> None:
        self._leave_lost_steps()
        if self._ranks.failure is not None:
            raise self._ranks.failure

    def _leave_lost_steps(self) -> None:
        """Forget the steps under way if a rank is lost: they may never end."""
        if self._ranks.failure is not None:
            self._abandon()


class LeadingMatchers(Matchers):
    """The matchers of rank 0: the other ranks compile the same grammar meanwhile."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ranks: Audience) -> None:
        super().__init__(tokenizer, vocab_size)
        self._ranks = ranks

    def make(self, grammar: GrammarSpec | None, stop_ids: frozenset[int]) -> GrammarMatcher | None:
        """See `Matchers`."""
        if grammar is not None:
            self._ranks.send(encode_frame(Prepare(grammar, stop_ids)))
        return super().make(grammar, stop_ids)


class SpareMatchers:
    """Matchers that another rank has compiled, or compiles, for requests to come."""

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._thread.submit(matchers.prepare)
        self._num_prepared = 0
        # By number, oldest first: the content and the matcher.
        self._spares: OrderedDict[
            int, tuple[tuple[str, frozenset[int]], Future[GrammarMatcher | None]]
        ] = OrderedDict()

    def prepare(self, message: Prepare) -> None:
        """Compile a grammar on a thread of its own."""
        future = self._thread.submit(self._matchers.make, message.grammar, message.stop_ids)
        self._num_prepared += 1
        self._spares[self._num_prepared] = (message.grammar.text, message.stop_ids), future
        if len(self._spares) > MOST_SPARES:
            self._spares.popitem(last=False)

    def take(self, request: Request) -> GrammarMatcher | None:
        """A new matcher for a request; None without a grammar."""
        if request.grammar is None:
            return None
        content = request.grammar.text, request.stop_ids
        for number, (other, future) in self._spares.items():
            if other == content:
                del self._spares[number]
                return future.result()
        return self._matchers.make(request.grammar, request.stop_ids)


class Follower:
    """Does on another rank's engine what rank 0 has done on its own.

    Attributes:
        num_steps: steps that are done.
    """

    def __init__(
        self,
        engine: Engine,
        matchers: SpareMatchers,
        faults: Faults,
        tell_word: Callable[[int, int], None],
    ) -> None:
        """Set up.

        Args:
            engine: of this rank.
            matchers: of this rank.
            faults: of this rank; they begin with `Begin`.
            tell_word: gets (steps, check word).
        """
        self.num_steps = 0
        self._engine = engine
        self._matchers = matchers
        self._faults = faults
        self._first_step: int | None = None  # that faults count
        self._requests: dict[int, Request] = {}
        self._keys: dict[Request, int] = {}
        self._check_word = CheckWord(tell_word)

    def take(self, message: Event | Prepare | Begin) -> None:
        """Apply a message; any error of this rank alone ends the engine."""
        if isinstance(message, Step):
            self._step(message)
        elif isinstance(message, NewRequest):
            request = message.request()
            request.matcher = self._matchers.take(request)
            self._engine.submit(request)
            self._requests[message.key], self._keys[request] = request, message.key
        elif isinstance(message, Abort | Stop):
            self._end(message)
        elif isinstance(message, Prepare):
            self._matchers.prepare(message)
        elif isinstance(message, Scratch):
            self._engine.run_scratch(message.query_lens)
        elif isinstance(message, Forget):
            self._engine.forget()
        else:
            self._first_step = self.num_steps
            self._engine.runner.faults = self._faults

    def _end(self, message: Abort | Stop) -> None:
        request = self._requests.pop(message.key)
        del self._keys[request]
        if isinstance(message, Stop):
            self._engine.stop(request, message.stop_string)
        else:
            self._engine.abort(request)

    def _step(self, message: Step) -> None:
        if message.pace is not None:
            self._engine.scheduler.budget.pace = message.pace
        self._engine.late = [self._requests[key] for key in message.late]
        if self._first_step is not None:
            self._faults.before_step(1 + self.num_steps - self._first_step)
        updates = self._engine.step()
        for update in updates:
            if update.request.finish_reason is not None:
                del self._requests[self._keys.pop(update.request)]
        self._check_word.add(self._engine.scheduler, updates)
        self.num_steps += 1
