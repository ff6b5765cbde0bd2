"""Oracle of sample_tokens: row after row in plain Python, noise in integers that do not wrap."""

import math

from torch import Tensor

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def sample_tokens(
    logits: Tensor, temperatures: list[float], keys: list[int], lengths: list[int], banned: set[int]
) -> list[tuple[int, int]]:
    """(token id, problem) of each row: problem 1 for logits that are not finite, 2 for no token."""
    results = []
    for row, temperature, key, length in zip(
        logits.tolist(), temperatures, keys, lengths, strict=True
    ):
        if not all(map(math.isfinite, row)):
            results.append((0, 1))
            continue
        best, token = -math.inf, 0
        for j, logit in enumerate(row):
            score = -math.inf if j in banned else logit
            if temperature > 0:
                score = score / temperature + _gumbel(key, length, j)
            if score > best:
                best, token = score, j
        results.append((token, 0) if best > -math.inf else (0, 2))
    return results


def _gumbel(key: int, length: int, token_id: int) -> float:
    state = _finalise(((key & _MASK) ^ length) + _GAMMA)
    bits = _finalise(state + (token_id + 1) * _GAMMA) >> 12
    return -math.log(-math.log((bits + 0.5) * 2.0**-52))


def _finalise(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
