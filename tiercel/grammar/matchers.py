"""Makes the matchers that keep the answers of one model within their grammars."""

from __future__ import annotations

from tiercel.errors import InvalidRequestError
from tiercel.grammar.matcher import MAX_MASK_SECONDS, GrammarMatcher, GrammarVocabulary
from tiercel.grammar.spec import GrammarSpec
from tiercel.text.tokenizer import Tokenizer


class Matchers:
    """Makes the matchers of requests; their shared vocabulary is made with the first."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_mask_s: float = MAX_MASK_SECONDS,
        max_first_s: float = MAX_MASK_SECONDS,
    ) -> None:
        """Set up.

        Args:
            tokenizer: tokenizer of the model.
            vocab_size: rows of the output matrix.
            max_mask_s: seconds that a mask may take.
            max_first_s: seconds that the first one may take, else the grammar is refused.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_mask_s = max_mask_s
        self._max_first_s = max_first_s
        self._vocabulary: GrammarVocabulary | None = None

    def prepare(self) -> None:
        """Make the vocabulary now: 0.1 s for 49,152 tokens and 1 s for 262,144."""
        tokenizer = self._tokenizer
        if self._vocabulary is None and tokenizer.has_text and tokenizer.stop_ids:
            self._vocabulary = GrammarVocabulary.of(tokenizer, self._vocab_size)

    def make(self, grammar: GrammarSpec | None, stop_ids: frozenset[int]) -> GrammarMatcher | None:
        """Compile a grammar into a matcher of one answer; None without a grammar.

        Args:
            grammar: grammar that the answer must match.
            stop_ids: token ids that end the answer, allowed where the grammar is complete.

        Raises:
            InvalidRequestError: the grammar cannot be enforced.
        """
        if grammar is None:
            return None
        self._tokenizer.require_text()
        if not self._tokenizer.stop_ids:
            raise InvalidRequestError(
                "this model has no token that ends an answer, so no form can be enforced."
            )
        self.prepare()
        assert self._vocabulary is not None, "there is a stop token"
        return GrammarMatcher(
            self._vocabulary, grammar, stop_ids, self._max_mask_s, self._max_first_s
        )
