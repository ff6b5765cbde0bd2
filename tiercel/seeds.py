"""Keys of the counter-based noise that sampling uses.

Noise depends on (seed, stream, position, token id) and on nothing else, so a request samples the
same answer alone, in a batch, after preemption, and on every rank. The generator is SplitMix64: a
Weyl sequence through a 64-bit finaliser. A row's key is mixed on the host once; each sample steps
it by its position and then by the token ids (`ops/sample_tokens.py`).

Source: "Fast Splittable Pseudorandom Number Generators", doi 10.1145/2714064.2660195.
"""

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


def mix_key(*parts: int) -> int:
    """Mix int64 parts to one int64 key; their order counts.

    A further part p steps a key to finalise((key ^ p) + GAMMA).
    """
    key = 0
    for part in parts:
        key = _finalise((key ^ (part & _MASK)) + GAMMA & _MASK)
    return signed(key)
