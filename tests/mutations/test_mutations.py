"""The list of mutations fits the code, and a sample of it is noticed."""

import functools
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.mutations.mutation import ROOT, Mutation, read_mutations
from tests.mutations.run import choose, run_all

MUTATIONS = read_mutations()


def test_each_mutation_applies_and_names_its_reason_and_tests():
    """One test of all: a thousand of a millisecond each would take seconds."""
    read = functools.cache(Path.read_text)
    for mutation in MUTATIONS:
        text = read(ROOT / mutation.file)
        assert mutation.apply(text) != text, mutation.name
        assert mutation.why.strip(), mutation.name
        assert mutation.tests, mutation.name
        for test in mutation.tests:
            path, _, function = test.partition("::")
            names = read(ROOT / path) if function else "def "
            is_there = f"def {function.partition('[')[0]}(" in names
            assert is_there or not function, f"{mutation.name}: {test}"


def test_the_list_is_long_enough_and_names_each_fault_once():
    assert len(MUTATIONS) >= 250
    assert sum(bool(m.equivalent) for m in MUTATIONS) <= len(MUTATIONS) // 10
    repeated = [k for k, n in Counter((m.file, m.old, m.new) for m in MUTATIONS).items() if n > 1]
    assert not repeated


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("absent", "x", "occurs 0 times"),
        ("a", "b", "occurs 2 times"),
        ("a\nb", "b\na", "differ in 2 lines"),
        ("b", "b", "differ in 0 lines"),
    ],
)
def test_a_mutation_that_does_not_fit_is_refused(old, new, fault):
    mutation = Mutation("here-1", "here", "file", old, new, "a slip", ("test",))
    with pytest.raises(ValueError, match=fault):
        mutation.apply("a\nb\na2")


def test_a_line_may_be_left_out():
    mutation = Mutation("here-1", "here", "file", "a\nb\n", "a\n", "a slip", ("test",))
    assert mutation.apply("a\nb\nc") == "a\nc"


def test_a_sample_is_spread_over_all():
    sample = choose(MUTATIONS, (), 15)
    assert len(sample) == 15
    assert len({m.area for m in sample}) > 4
    assert {m.area for m in choose(MUTATIONS, ["serve"], 0)} == {"serve"}


def test_entries_are_known_fields():
    for path in (ROOT / "tests/mutations").glob("*.toml"):
        for entry in tomllib.loads(path.read_text())["mutation"]:
            assert set(entry) <= {"file", "old", "new", "why", "tests", "equivalent"}


@pytest.mark.slow
def test_a_sample_is_noticed():
    results = run_all(choose(MUTATIONS, (), 15), jobs=2)
    assert set(results.values()) <= {"killed", "equivalent"}, results
