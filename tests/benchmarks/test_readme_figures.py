"""Each number of README's tables "Measured" is in a file of benchmarks/results."""

import re
import tomllib
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from benchmarks import figures

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CELLS = tomllib.loads((Path(__file__).parent / "readme_figures.toml").read_text())["cell"]
FILES = {path.stem: figures.read(path) for path in (ROOT / "benchmarks/results").glob("*.json")}
LINK = re.compile(r"\[([^\]]*)\]\(benchmarks/results/(\w+)\.json\)")
LINKS = re.compile(r" *\((?:\[[^\]]*\]\([^)]*\)(?:, )?)+\)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def measured(readme):
    """The tables of the section: the text since the previous table, and the rows of cells."""
    section = re.search(r"^## Measured\n(.*?)^## ", readme, re.M | re.S)[1]
    found, before = [], ""
    for text in re.findall(r".*?\n(?=\n|\Z)", section, re.S):
        rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
        before = before + text
        if rows:
            found.append((before, rows[2:]))
            before = ""
    return found


def shown_cells(readme):
    """(row, column) -> text of each cell that has a number, without links and code."""
    cells = {}
    for _, rows in measured(readme):
        for label, *others in rows:
            for column, text in enumerate(others, 1):
                plain = LINK.sub("", text)
                if NUMBER.search(plain):
                    cells[LINKS.sub("", label), column] = plain
    return cells


def value(source):
    """The value of a figure, from its file."""
    field, where = source["field"], source.get("where", {})
    rows = [
        row[field]
        for row in FILES[source["file"]].rows
        if field in row and where.items() <= row.items()
    ]
    assert len(rows) == 1 or "pick" in source, f"{source} chooses {len(rows)} rows"
    chosen = max(rows) if source.get("pick") == "max" else min(rows)
    return Decimal(repr(chosen)) * Decimal(repr(source.get("scale", 1)))


def step(exact, source):
    """The value of the last significant digit."""
    if "digits" in source:
        return Decimal(1).scaleb(exact.adjusted() - source["digits"] + 1)
    return Decimal(1).scaleb(Decimal(source["shown"].replace(",", "")).as_tuple().exponent)


def figures_of(cell):
    """(shown number, measured number, value of a digit, whether it is a bound) of a cell."""
    for figure in cell["figures"]:
        source = cell | figure
        exact = value(source)
        if "over" in figure:
            exact *= Decimal(repr(source.get("scale", 1))) / value(source | figure["over"])
        shown = Decimal(figure["shown"].replace(",", ""))
        yield shown, exact, step(exact, source), source.get("is_bound", False)


def is_shown(shown, exact, digit, is_bound):
    """Whether a measured number is shown in this way."""
    if is_bound:
        return exact < shown
    return exact.quantize(digit, ROUND_HALF_UP) == shown


def test_every_number_was_measured():
    cells = {(cell["row"], cell["column"]): cell for cell in CELLS}
    assert len(cells) == len(CELLS)
    texts = shown_cells(README)
    assert texts.keys() == cells.keys()  # each cell has a list, each list a cell
    for at, text in texts.items():
        assert NUMBER.findall(text) == [figure["shown"] for figure in cells[at]["figures"]], at
        for shown, exact, *how in figures_of(cells[at]):
            assert is_shown(shown, exact, *how), f"{at}: {shown} is shown, {exact:.6} was measured"


def test_a_number_one_digit_off_would_be_found():
    for cell in CELLS:
        for shown, exact, digit, is_bound in figures_of(cell):
            others = (exact,) if is_bound else (shown - digit, shown + digit)
            assert not any(is_shown(other, exact, digit, is_bound) for other in others), cell


def test_rows_link_their_files_with_the_revision():
    """So that a figure of an older revision is marked as such."""
    files = {}
    for cell in CELLS:
        for figure in cell["figures"]:
            sources = [cell | figure, cell | figure | figure.get("over", {})]
            files.setdefault(cell["row"], set()).update(source["file"] for source in sources)
    for text, rows in measured(README):
        above = {file for _, file in LINK.findall(text.partition("\n|")[0])}
        for label, *_ in rows:
            linked = {file for _, file in LINK.findall(label)}
            assert linked, f"{label}: links no file"
            assert linked <= files[LINKS.sub("", label)] <= linked | above, label
    for text, file in LINK.findall(README):
        assert FILES[file].short_revision in text, f"{file} was measured at another revision"
