"""The matcher of an answer and its grammar: which tokens may come next (llguidance).

A stop token may come exactly where the grammar may end, and ends it; stop tokens never reach
llguidance, whose own bookkeeping of them does not survive a rollback. A grammar that is refused, or
that costs too much on the way, ends its own request alone: nothing is shared between matchers but
the vocabulary. (llguidance could copy a compiled grammar, but copies share one budget of states, so
that a long answer of one request would end another's.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from msgspec import Struct

from tiercel.errors import InvalidRequestError
from tiercel.grammar.json_schema import refuse
from tiercel.grammar.spec import GrammarSpec

if TYPE_CHECKING:
    from tiercel.text.tokenizer import Tokenizer

MAX_MASK_SECONDS: Final = 1.0
TOO_COMPLEX: Final = "schema_too_complex"
_MESSAGE_CHARS: Final = 300
# Words in llguidance's error for a grammar that exceeds one of its limits.
_LIMIT_WORDS: Final = re.compile(r"too (big|large|many|complex|deep)|limit|fuel", re.IGNORECASE)
_PLACE: Final = re.compile(r"^((at )?\d+\(\d+\): |failed to compile JSON schema: )+")
_NOTHING_FITS: Final = "no answer has the form that is asked for."


class TokenTable(Struct, frozen=True):
    """The tokens of a vocabulary, as a grammar needs them.

    Attributes:
        tokens: bytes by id, for `vocab_size` ids; empty for a token that no text may hold.
        control_ids: ids of control tokens, whose bytes are their names.
        stop_ids: ids that end an answer.
    """

    tokens: tuple[bytes, ...]
    control_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]


def read_token_table(tokenizer: Tokenizer, vocab_size: int) -> TokenTable:
    """Read the token table of a tokenizer.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: rows of the output matrix; ids beyond the tokenizer's have no text.
    """
    known = range(min(vocab_size, tokenizer.vocab_size))
    tokens = [tokenizer.token_bytes(i, with_special=True) for i in known]
    stop_ids = tuple(i for i in tokenizer.stop_ids if i < vocab_size)
    control_ids = {i for i in known if tokenizer.is_special(i) and tokens[i]}
    return TokenTable(
        tokens=(*tokens, *[b""] * (vocab_size - len(tokens))),
        control_ids=tuple(sorted(control_ids | set(stop_ids))),
        stop_ids=stop_ids,
    )


class _Encoder:
    """The interface of a tokenizer that `TokenizerWrapper` needs."""

    def __init__(self, table: TokenTable, encode: Callable[[str], list[int]]) -> None:
        self.tokens = table.tokens
        self.special_token_ids = table.control_ids
        self.eos_token_id = table.stop_ids[0]
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace"))


class GrammarVocabulary:
    """A vocabulary in llguidance's form; made once per model, threads may share it.

    Args:
        table: token table, with at least one stop token.
        encode: function from text to ids within an answer; where a grammar leaves no choice, the
            model is offered these tokens for the text and not its single bytes.

    Takes 0.1 s for 49,152 tokens and 1 s for 262,144.
    """

    def __init__(self, table: TokenTable, encode: Callable[[str], list[int]]) -> None:
        self.stop_ids = frozenset(table.stop_ids)
        self.vocab_size = len(table.tokens)
        self.num_words = -(-self.vocab_size // 32)
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(_Encoder(table, encode)),
            n_vocab=self.vocab_size,
            eos_token=list(table.stop_ids),
        )

    @staticmethod
    def of(tokenizer: Tokenizer, vocab_size: int) -> GrammarVocabulary:
        """Make the vocabulary of a model's tokenizer and the rows of its output matrix."""
        return GrammarVocabulary(read_token_table(tokenizer, vocab_size), tokenizer.encode_inner)


class GrammarMatcher:
    """The state of one answer in its grammar.

    Args:
        vocabulary: vocabulary of the model.
        spec: the grammar.
        stop_ids: ids that end this request; None for those of the vocabulary.
        max_mask_s: seconds that a mask may take.
        max_first_s: seconds that the first one may take.

    Attributes:
        error: None, or ``schema_too_complex`` once it cannot go on; the request then ends. The same
            tokens lead to it in every process.
        is_late: whether a mask took too long, by this machine's clock; the request then ends too.

    Raises:
        InvalidRequestError: code `invalid_schema` or `schema_too_complex`, with the reason.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        spec: GrammarSpec,
        stop_ids: Iterable[int] | None = None,
        max_mask_s: float = MAX_MASK_SECONDS,
        max_first_s: float = MAX_MASK_SECONDS,
    ) -> None:
        self._vocabulary = vocabulary
        self._max_mask_s = max_mask_s
        stops = vocabulary.stop_ids if stop_ids is None else frozenset(stop_ids)
        self._stops = stops | vocabulary.stop_ids
        stop_ids = np.array(sorted(self._stops), np.int64)
        self._stop_words = stop_ids // 32
        self._stop_bits = np.int32(1) << (stop_ids % 32).astype(np.int32)
        self._is_stopped = False
        self.error: str | None = None
        self.is_late = False
        self._matcher = LLMatcher(
            vocabulary.tokenizer,
            spec.text,
            log_level=0,
            limits=LLParserLimits(verbose_errors=False),
        )
        self._check()
        # The faults of some grammars only show with the first mask; it is kept for the first token.
        self._first: npt.NDArray[np.int32] | None = np.zeros(vocabulary.num_words, np.int32)
        started_s = perf_counter()
        self._compute(self._first)
        self._check()
        if perf_counter() - started_s > max_first_s:
            raise refuse(TOO_COMPLEX, "the form takes too long to enforce.", "Simplify it.")
        if not self._first.any():
            raise refuse("invalid_schema", _NOTHING_FITS)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise grammar_error(self._matcher.get_error())

    @property
    def num_words(self) -> int:
        """Number of int32 words of a mask."""
        return self._vocabulary.num_words

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return self._is_stopped or self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether nothing but a stop token may follow, or one has come."""
        return self._is_stopped or (self._matcher.is_stopped() and not self._matcher.is_error())

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Write the mask of the tokens that may come next; sets `is_late` after over a second.

        Args:
            row: (ceil(vocab_size / 32),) int32, contiguous; bit i % 32 of word i // 32 is token i.
        """
        if self._first is not None:
            row[:] = self._first
            return
        started_s = perf_counter()
        self._compute(row)
        if self._matcher.is_error():
            self.error = TOO_COMPLEX
        self.is_late |= perf_counter() - started_s > self._max_mask_s

    def _compute(self, row: npt.NDArray[np.int32]) -> None:
        if self._is_stopped:
            row[:] = 0
        else:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if not self._matcher.is_error() and self.is_accepting:
            np.bitwise_or.at(row, self._stop_words, self._stop_bits)
        else:
            np.bitwise_and.at(row, self._stop_words, ~self._stop_bits)

    def advance(self, token_id: int) -> None:
        """Take the token that was chosen; sets `error` if the grammar cannot go on."""
        self._first = None
        if token_id in self._stops and self.is_accepting:
            self._is_stopped = True
        elif self._is_stopped or not self._matcher.consume_token(token_id):
            self.error = TOO_COMPLEX

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """Count the tokens, from the first on, that could come next; changes nothing."""
        stops = [index for index, i in enumerate(token_ids) if i in self._stops]
        body = list(token_ids[: stops[0]]) if stops else list(token_ids)
        if self._is_stopped or self.error is not None:
            return 0
        num_valid = self._matcher.validate_tokens(body)
        if not stops or num_valid < len(body):
            return num_valid
        self._matcher.consume_tokens(body)
        may_end = self._matcher.is_accepting()
        self._matcher.rollback(len(body))
        return num_valid + may_end

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens of `advance`; not beyond an error."""
        if num_tokens and self._is_stopped:
            self._is_stopped = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)


def grammar_error(text: str) -> InvalidRequestError:
    """The error for a message of llguidance: its first line, and the line with the reason."""
    lines = [line.strip() for line in text.replace("<non-verbose/>", "").splitlines()]
    message = _PLACE.sub("", next(filter(None, lines), "it cannot be compiled"))
    reasons = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    if reasons:
        message = f"{message.removesuffix(':')}: {reasons[0]}"
    if message.startswith("NoExtension"):
        return refuse("invalid_schema", _NOTHING_FITS)
    code = TOO_COMPLEX if _LIMIT_WORDS.search(message) else "invalid_schema"
    return refuse(code, f"the form cannot be enforced: {message[:_MESSAGE_CHARS]}.")
