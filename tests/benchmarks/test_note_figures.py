"""Tables of measurements name their file and its revision, and each file is named on a page.

A section here is the text from a heading or a paragraph that begins in bold to the next one.
"""

import re
from pathlib import Path

from benchmarks import figures

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks/results").iterdir())
REVISIONS = {path.stem: figures.read(path).short_revision for path in RESULTS}
NOTES = sorted((ROOT / "docs/notes").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *NOTES]
NAME = re.compile(r"\b([a-z]\w*)\.json\b")
PRINTED = "from printed output"  # of a run whose figures were not kept in a file
NUMBERS = re.compile(r"\|.*\| [*~+-]*\d")
SETTINGS = re.compile(r"\| (?:option|what|row|name|field)\b")
TABLE = re.compile(r"(?:^\|.*\n)+", re.M)


def sections(text):
    return re.split(r"^(?=#|\*\*)", text, flags=re.M)


def named(text):
    return {name for name in NAME.findall(text) if name in REVISIONS}


def is_measured(table):
    """Whether cells after the first column begin with numbers that are not limits or defaults."""
    return bool(NUMBERS.search(table)) and not SETTINGS.match(table)


def unnamed_tables(text):
    """Tables of measurements in sections that do not name their source."""
    return [
        table.splitlines()[0]
        for section in sections(text)
        for table in TABLE.findall(section)
        if is_measured(table) and not named(section) and PRINTED not in section
    ]


def old_revisions(text):
    """Files that a section names without their measured revision."""
    return [
        f"{name}.json, {REVISIONS[name]}"
        for section in sections(text)
        for name in sorted(named(section))
        if REVISIONS[name] not in section
    ]


def found_on_pages(search):
    """What `search` finds on each page where it finds anything."""
    found = {page.name: search(page.read_text()) for page in PAGES}
    return {name: faults for name, faults in found.items() if faults}


def test_tables_name_their_file():
    assert found_on_pages(unnamed_tables) == {}


def test_files_are_named_with_their_revision():
    """So that figures of an older revision are marked as such."""
    assert found_on_pages(old_revisions) == {}


def test_named_files_are_there():
    paths = r"benchmarks/results/(\w+)\.json|`(\w+_h200)\.json`"

    def missing(text):
        return {one or other for one, other in re.findall(paths, text)} - REVISIONS.keys()

    assert found_on_pages(missing) == {}


def test_each_file_is_named_by_a_page():
    pages = "\n".join(page.read_text() for page in PAGES)
    assert named(pages) == REVISIONS.keys()


def test_a_table_without_a_file_and_a_file_without_its_revision_are_found():
    table = "| shape | us |\n|---|---|\n| 64 x 512 | 32.8 |\n"
    name, revision = next(iter(REVISIONS.items()))
    above = f"## Figures\n`{name}.json`, revision {revision}:\n\n"
    assert unnamed_tables(above + table) == old_revisions(above + table) == []
    assert unnamed_tables(above + "## Others\n" + table) == ["| shape | us |"]
    assert unnamed_tables(f"**Others**, {PRINTED}:\n\n" + table) == []
    assert old_revisions(above.replace(revision, "0000000")) == [f"{name}.json, {revision}"]
