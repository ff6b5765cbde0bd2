"""Acceptance of draft tokens, from an engine's own counts or from a server's metrics."""

from __future__ import annotations

import re
from typing import Final

import msgspec

# Matches any engine that uses vLLM's metric names.
_LINE: Final = re.compile(
    r"^\w+:spec_decode_(?P<name>num_\w+)_total\{(?P<labels>[^}]*)\} (?P<value>[0-9.e+]+)$",
    re.MULTILINE,
)
_PLACE: Final = re.compile(r'position="(\d+)"')


class DraftFigures(msgspec.Struct, frozen=True):
    """Draft tokens of one level.

    Attributes:
        num_drafts: number of request steps that verified draft tokens.
        num_draft_tokens: number of draft tokens in them.
        accepted_per_pos: number of accepted tokens at the first, second, ... position.
    """

    num_drafts: int
    num_draft_tokens: int
    accepted_per_pos: list[int]

    @property
    def acceptance(self) -> float | None:
        """The acceptance rate; None without draft tokens."""
        if not self.num_draft_tokens:
            return None
        return sum(self.accepted_per_pos) / self.num_draft_tokens

    def place_rates(self) -> list[float]:
        """The acceptance rate at the first, second, ... position, over all steps with drafts."""
        return [count / max(1, self.num_drafts) for count in self.accepted_per_pos]

    def since(self, before: DraftFigures) -> DraftFigures:
        """The increase since earlier totals."""
        earlier = before.accepted_per_pos + [0] * len(self.accepted_per_pos)
        return DraftFigures(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            [now - then for now, then in zip(self.accepted_per_pos, earlier, strict=False)],
        )


def read_metrics(text: str) -> DraftFigures | None:
    """The totals in the metrics of a server; None if it does not count draft tokens."""
    totals: dict[str, int] = {}
    places: dict[int, int] = {}
    for found in _LINE.finditer(text):
        value, place = int(float(found["value"])), _PLACE.search(found["labels"])
        if found["name"] == "num_accepted_tokens_per_pos" and place is not None:
            places[int(place[1])] = places.get(int(place[1]), 0) + value
        else:
            totals[found["name"]] = totals.get(found["name"], 0) + value
    if "num_draft_tokens" not in totals:
        return None
    return DraftFigures(
        totals.get("num_drafts", 0),
        totals["num_draft_tokens"],
        [places.get(i, 0) for i in range(1 + max(places, default=-1))],
    )
