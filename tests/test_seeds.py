"""Keys are those of SplitMix64, and depend on each of their parts."""

import itertools

from tiercel.seeds import mix_key, signed

# The first output of the generator for some seeds, from its authors' C code.
FIRST = {0: 0xE220A8397B1DCDAF, 1234567: 6457827717110365317}


def splitmix64(state):
    """The published steps, one after the other; the first output."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_a_key_of_one_part_is_the_first_output():
    for seed, expected in FIRST.items():
        assert splitmix64(seed) == expected
        assert mix_key(seed) % 2**64 == expected


def test_each_further_part_steps_the_key():
    for parts in itertools.product((0, 1, -1, 2**63 - 1, -(2**63)), repeat=3):
        key = 0
        for part in parts:
            key = splitmix64(key ^ (part % 2**64))
        assert mix_key(*parts) == signed(key)
        assert -(2**63) <= mix_key(*parts) < 2**63


def test_parts_and_their_order_count():
    keys = {mix_key(*parts) for parts in itertools.product(range(-8, 8), repeat=2)}
    assert len(keys) == 256


def test_the_bits_of_a_signed_number_are_those_of_the_unsigned_one():
    for value in (0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1):
        assert signed(value) % 2**64 == value
        assert -(2**63) <= signed(value) < 2**63
