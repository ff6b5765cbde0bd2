"""One-line faults that a person could make, and the tests that must notice each of them.

A TOML file of this folder holds the mutations of an area:

    [[mutation]]
    file = "tiercel/cache/prefix.py"     # from the root of the repository
    old = "first <= last"                # occurs once in the file; may span lines to be unique
    new = "first < last"                 # differs from `old` in one line
    why = "off by one at the window's last block"
    tests = ["tests/cache/test_prefix.py::test_windows"]   # of the default run; one must fail
    equivalent = ""                      # or why no test can notice it

`python -m tests.mutations.run` (`make mutants`) applies them one by one.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A fault in one line.

    Attributes:
        name: area and number, for instance "models-7"; numbers start at 1 in each file.
        area: the TOML file's name.
        file: from the root of the repository.
        old: what the file says.
        new: what it says with the fault.
        why: how a person comes to write it.
        tests: paths or test ids for pytest.
        equivalent: why no test can tell it from the original; empty for those that must be noticed.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def apply(self, text: str) -> str:
        """Return the file's text with the fault.

        Raises:
            ValueError: `old` does not occur exactly once, or more than one line differs.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: 'old' occurs {count} times in {self.file}, not once")
        before, after = self.old.split("\n"), self.new.split("\n")
        removed = set(range(len(before)))
        if len(before) == len(after):
            removed = {i for i, line in enumerate(before) if line != after[i]}
        elif len(before) == len(after) + 1:  # a line left out
            removed = {i for i in removed if before[:i] + before[i + 1 :] == after}
            removed = set(list(removed)[:1])
        if len(removed) != 1:
            raise ValueError(f"{self.name}: 'old' and 'new' differ in {len(removed)} lines, not 1")
        return text.replace(self.old, self.new)


def read_mutations(folder: Path = Path(__file__).parent) -> list[Mutation]:
    """Read the mutations of all areas, in the order of their files."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for number, entry in enumerate(tomllib.loads(path.read_text())["mutation"], 1):
            tests = tuple(entry.pop("tests", ()))
            found.append(Mutation(f"{path.stem}-{number}", path.stem, tests=tests, **entry))
    return found
