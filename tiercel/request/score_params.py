"""The parameters of scoring, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import MappingProxyType
from typing import Final

from tiercel.errors import ArgumentError
from tiercel.params import shown

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "normalize": ("vocab", "labels"),
        "label_normalization": ("sum", "mean"),
        "long_items": ("refuse", "skip", "cut"),
    }
)


@dataclass(frozen=True, slots=True)
class ScoreParams:
    """The parameters of scoring items after a query; see `LLM.score`.

    Attributes:
        labels: texts whose probability as the continuation is wanted; None with `label_token_ids`.
        label_token_ids: token ids whose probability is wanted; None with `labels`.
        suffix: text or token ids after every item, before the label.
        normalize: ``vocab``: log-probabilities over the whole vocabulary; ``labels``: over the
            labels alone.
        item_first: whether the item comes before the query. Nothing is shared then: each item is
            computed with a query of its own.
        label_normalization: ``sum`` or ``mean`` over the tokens of a label.
        strict_labels: whether a label whose tokens begin another label is refused.
        long_items: treatment of an item that does not fit the context: an error of the call
            (``refuse``), of the item (``skip``), or its end is cut (``cut``).

    Raises:
        ArgumentError: a field cannot be read, or labels are missing or doubled.
    """

    labels: Sequence[str] | None = None
    label_token_ids: Sequence[int] | None = None
    suffix: str | Sequence[int] = ""
    normalize: str = "vocab"
    item_first: bool = False
    label_normalization: str = "sum"
    strict_labels: bool = False
    long_items: str = "refuse"

    def __post_init__(self) -> None:
        name = "labels" if self.labels is not None else "label_token_ids"
        put = object.__setattr__  # the dataclass is frozen
        put(self, name, _label_list(self.labels, self.label_token_ids))
        if not isinstance(self.suffix, Sequence):
            raise ArgumentError(
                f"suffix={shown(self.suffix)} is neither text nor token ids.", param="suffix"
            )
        for flag in ("item_first", "strict_labels"):
            if not isinstance(getattr(self, flag), bool):
                raise ArgumentError(f"{flag}={shown(getattr(self, flag))} is no bool.", param=flag)
        for field_name, allowed in _CHOICES.items():
            value = getattr(self, field_name)
            if value not in allowed:
                raise ArgumentError(
                    f"{field_name}={shown(value)} is not known.",
                    hint=f"Use {' or '.join(allowed)}.",
                    param=field_name,
                )


def _label_list(labels: object, label_token_ids: object) -> tuple[str | int, ...]:
    """The one list of labels that is given.

    Raises:
        ArgumentError: there is none or two, it is empty, or a label comes twice or is of no use.
    """
    if (labels is None) == (label_token_ids is None):
        raise ArgumentError(
            f"{'neither' if labels is None else 'both'} of labels and label_token_ids "
            f"{'is' if labels is None else 'are'} given.",
            hint="Give one of them.",
            param="labels",
        )
    name, given = ("labels", labels) if labels is not None else ("label_token_ids", label_token_ids)
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ArgumentError(f"{name}={shown(given)} is no list with at least one.", param=name)
    seen: dict[str | int, None] = {}
    for i, label in enumerate(given):
        own = _label(label, is_text=labels is not None)
        if own is None:
            entry, what = f"{name}[{i}]", "a text" if labels is not None else "a token id"
            raise ArgumentError(f"{entry}={shown(label)} is not {what}.", param=entry)
        if own in seen:
            raise ArgumentError(
                f"{name} holds {shown(label)} twice.", hint="Give each label once.", param=name
            )
        seen[own] = None
    return tuple(seen)


def _label(value: object, *, is_text: bool) -> str | int | None:
    """The label as it is kept; None if it is not of this kind."""
    if is_text:
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)
