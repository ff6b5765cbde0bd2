"""docs/architecture.md names files and functions that exist, and follows the contract's order."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()
# `models/model.py:Model`, `tiercel/cache/`: a path from the root or from the package.
NAMES = sorted(set(re.findall(r"`([\w./-]+(?:\.py|/)(?::[\w.]+)?)`", PAGE)))


def defined_in(path):
    """Qualified names of functions and classes in a file."""
    found = set()

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(path.read_text()), "")
    return found


def test_names_exist():
    for name in NAMES:
        file, _, function = name.partition(":")
        places = [base / file for base in (ROOT, ROOT / "tiercel", ROOT / "tiercel/serve")]
        places += [ROOT / "tiercel/kernels" / file]
        (path, *_) = [place for place in places if place.exists()] or [None]
        assert path is not None, f"{file} does not exist"
        if function:
            assert function in defined_in(path), f"{file} has no {function}"


def test_the_page_names_enough():
    assert len(NAMES) > 40
    assert sum(":" in name for name in NAMES) >= 8


def test_every_package_is_in_the_map():
    packages = {path.parent.name for path in (ROOT / "tiercel").glob("*/__init__.py")}
    assert packages == {
        name.removeprefix("tiercel/").rstrip("/")
        for name in NAMES
        if re.fullmatch(r"tiercel/\w+/", name)
    }


def test_the_map_is_in_the_order_of_the_contract():
    """Packages of the layers contract come in the same order as on the page."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [c["layers"] for c in contracts["contracts"] if c["id"] == "layers"]
    rank = {
        name.strip().removeprefix("tiercel."): number
        for number, layer in enumerate(layers)
        for name in layer.split("|")
    }
    table = PAGE.partition("## The map")[2].partition("## The way of a token")[0]
    named = re.findall(r"`tiercel/(\w+)/`", table)
    ranks = [rank[name] for name in named if name in rank]
    assert ranks == sorted(ranks)
