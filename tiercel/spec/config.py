"""How drafts are made: the settings of an engine, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tiercel.errors import ArgumentError
from tiercel.ops.paged_attention import MAX_DECODE_QUERIES

METHODS: Final = ("off", "ngram", "mtp", "hybrid")
MAX_DRAFTS: Final = MAX_DECODE_QUERIES - 1  # the attention of a step with few tokens takes these
DEFAULT_DRAFTS: Final = 5


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """Resolved settings.

    Attributes:
        method: where drafts come from: nowhere, the text itself, a head of the model, or both.
        max_drafts: K, drafts of a row and step at most.
        min_ngram: shortest run of tokens that is looked up in the text, and
        max_ngram: the longest.
    """

    method: str = "off"
    max_drafts: int = 0
    min_ngram: int = 2
    max_ngram: int = 4

    @property
    def has_ngrams(self) -> bool:
        """Whether drafts are looked up in the text."""
        return self.method in ("ngram", "hybrid")

    @property
    def has_head(self) -> bool:
        """Whether a head of the model drafts."""
        return self.method in ("mtp", "hybrid")


NO_DRAFTS: Final = SpecConfig()


def num_head_drafts(config: SpecConfig) -> int:
    """Drafts that the model's head makes: all, or the first one, which the text continues."""
    if not config.has_head:
        return 0
    return config.max_drafts if config.method == "mtp" else 1


def resolve_spec(method: object, num_spec_tokens: object) -> SpecConfig:
    """The settings that options ask for.

    Args:
        method: one of `METHODS`.
        num_spec_tokens: K, 0 to 15; 0 is off, None is 5.

    Raises:
        ArgumentError: an unknown method, or a number out of range.
    """
    if method not in METHODS:
        raise ArgumentError(
            f"spec={method!r:.80} is unknown.", hint=f"Use one of {', '.join(METHODS)}."
        )
    count = DEFAULT_DRAFTS if num_spec_tokens is None else num_spec_tokens
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_DRAFTS:
        raise ArgumentError(
            f"num_spec_tokens={count!r:.80} is out of range.", hint=f"Use 0 to {MAX_DRAFTS}."
        )
    if method == "off" or count == 0:
        return NO_DRAFTS
    return SpecConfig(str(method), count)
