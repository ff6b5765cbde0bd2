"""Oracle of verify_accept: row after row, slot after slot, in plain Python.

Noise is in integers that do not wrap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


@dataclass
class Row:
    """One row of a batch: its logits rows, and its state.

    `draft_probs` has the probabilities that each draft was sampled from, or is None.
    """

    logits: list[list[float]]
    drafts: list[int]
    temperature: float
    key: int
    length: int
    draft_probs: list[list[float]] | None = None


def verify_accept(row: Row, banned: set[int]) -> tuple[list[int], int]:
    """(new tokens, problem): the drafts that are right and one token more."""
    emitted: list[int] = []
    for slot, line in enumerate(row.logits[: 1 + len(row.drafts)]):
        token, problem = _choose(row, slot, line, banned)
        if problem:
            return (emitted, 0) if emitted else ([0], problem)
        emitted.append(token)
        if slot == len(row.drafts) or token != row.drafts[slot]:
            break
    return emitted, 0


def has_unsound_draft(row: Row) -> bool:
    """Whether logits that the row used are not finite."""
    lines = row.logits[: 1 + len(row.drafts)]
    return any(not math.isfinite(x) for line in lines for x in line)


def learned(chance: float, num_drafts: int, num_right: int) -> float:
    """The estimate after one step: a step of 1/8 towards each trial."""
    for _ in range(num_right):
        chance += (1.0 - chance) / 8
    return chance - chance / 8 if num_right < num_drafts else chance


def wanted(chance: float, theta: float, limit: int) -> int:
    """The number of drafts that are worth their time."""
    return sum(chance**j > theta for j in range(1, limit + 1))


def _choose(row: Row, slot: int, line: Sequence[float], banned: set[int]) -> tuple[int, int]:
    if not all(map(math.isfinite, line)):
        return 0, 1
    if len(banned) == len(line):
        return 0, 2
    place = row.length + slot
    if row.temperature > 0 and row.draft_probs is not None:
        return _judge(row, slot, line, banned, place), 0
    best, token = -math.inf, 0
    for j, logit in enumerate(line):
        score = -math.inf if j in banned else logit
        if row.temperature > 0:
            score = score / row.temperature + _gumbel(row.key, place, j)
        if score > best:
            best, token = score, j
    return token, 0


def _judge(row: Row, slot: int, line: Sequence[float], banned: set[int], place: int) -> int:
    """Accept the draft with probability min(1, p / q), else sample from max(0, p - q)."""
    scaled = [-math.inf if j in banned else x / row.temperature for j, x in enumerate(line)]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    p = [weight / sum(weights) for weight in weights]
    key = _finalise((row.key & _MASK ^ _MASK) + _GAMMA)
    if slot < len(row.drafts):
        assert row.draft_probs is not None
        q, draft_id = row.draft_probs[slot], row.drafts[slot]
        if _uniform(key, place, len(p)) * q[draft_id] < p[draft_id]:
            return draft_id
        rest = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
        if sum(rest) >= 1e-10:
            p = rest
    scores = [math.log(x) + _gumbel(key, place, j) if x > 0 else -math.inf for j, x in enumerate(p)]
    return scores.index(max(scores))


def _uniform(key: int, place: int, token_id: int) -> float:
    state = _finalise(((key & _MASK) ^ place) + _GAMMA)
    return ((_finalise(state + (token_id + 1) * _GAMMA) >> 12) + 0.5) * 2.0**-52


def _gumbel(key: int, place: int, token_id: int) -> float:
    return -math.log(-math.log(_uniform(key, place, token_id)))


def _finalise(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
