"""Keys of the counter-based noise, on the host: see `engine/random.py` for the generator."""

from __future__ import annotations

_MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def signed(value: int) -> int:
    """The int64 with the bits of an unsigned one."""
    return value - 2**64 if value >= 2**63 else value


def _finalise(value: int) -> int:
    value = (value ^ (value >> 30)) * MIX_1 & _MASK
    value = (value ^ (value >> 27)) * MIX_2 & _MASK
    return value ^ (value >> 31)


def mix_key(seed: int, stream: int, position: int) -> int:
    """One int64 key of a draw: of answer `stream` at the place `position`."""
    key = 0
    for part in (seed & _MASK, stream, position):
        key = _finalise((key ^ part) + GAMMA & _MASK)
    return signed(key)
