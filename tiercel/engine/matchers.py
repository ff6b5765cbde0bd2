"""What follows the answers of one model through their grammars.

Compiling a grammar takes up to a second, so it is not done on the thread of the loop. A caller in
the engine's process compiles before it submits the request; requests from another process are
compiled on a thread of their own (`MatcherQueue`). The compiler releases the GIL meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tiercel.engine.fair_queue import FairQueue
from tiercel.engine.grammar_matcher import GrammarMatcher, GrammarVocabulary
from tiercel.engine.request import Request
from tiercel.errors import InvalidRequestError, TiercelError
from tiercel.text.tokenizer import Tokenizer


class Matchers:
    """Makes the matchers of requests; the vocabulary that they share is made for the first."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Set up.

        Args:
            tokenizer: of the model.
            vocab_size: rows of the output matrix.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: GrammarVocabulary | None = None

    def prepare(self) -> None:
        """Make the vocabulary now: 0.1 s for 49,152 tokens and 1 s for 262,144."""
        if self._vocabulary is None and self._tokenizer.stop_ids:
            self._vocabulary = GrammarVocabulary.of(self._tokenizer, self._vocab_size)

    def attach(self, request: Request) -> None:
        """Give a request the matcher of its grammar, if it has one.

        Raises:
            InvalidRequestError: the grammar cannot be enforced.
        """
        if request.grammar is None:
            return
        if not self._tokenizer.stop_ids:
            raise InvalidRequestError(
                "this model has no token that ends an answer, so no form can be enforced."
            )
        self.prepare()
        assert self._vocabulary is not None, "there is a stop token"
        request.matcher = GrammarMatcher(self._vocabulary, request.grammar, request.stop_ids)


class MatcherQueue:
    """Attaches matchers to requests one after the other, those of different clients in turn.

    Args:
        attach: gives a request its matcher, or raises a `TiercelError`.
        is_wanted: whether a request that waited still needs one.
        on_done: called on the queue's thread with the request and the error, if there was one.
        on_broken: called with what failed in another way; nothing can be trusted then.
    """

    def __init__(
        self,
        attach: Callable[[Request], None],
        is_wanted: Callable[[Request], bool],
        on_done: Callable[[Request, TiercelError | None], None],
        on_broken: Callable[[Future[None]], None],
    ) -> None:
        self._attach, self._is_wanted = attach, is_wanted
        self._on_done, self._on_broken = on_done, on_broken
        self._waiting: FairQueue[Request] = FairQueue()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammars")  # started by the first request

    def put(self, request: Request) -> None:
        """Add a request with a grammar; from any thread."""
        with self._lock:
            self._waiting.put(request.client, request)
        # Each call takes the request whose turn it is then, not this one.
        self._thread.submit(self._attach_next).add_done_callback(self._check)

    def _attach_next(self) -> None:
        with self._lock:
            request = self._waiting.take()
        if request is None or not self._is_wanted(request):
            return
        try:
            self._attach(request)
        except TiercelError as error:
            self._on_done(request, error)
        else:
            self._on_done(request, None)

    def _check(self, call: Future[None]) -> None:
        if not call.cancelled() and call.exception() is not None:
            self._on_broken(call)
