"""The worked example of docs/scoring.md works, and the page names all options."""

import re
from pathlib import Path

from tests.cli.harness import environment, tiercel
from tiercel.cli.main import make_app

PAGE = (Path(__file__).parents[1] / "docs/scoring.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
QUERY, REVIEWS = (text for kind, text in BLOCKS if kind == "text")
COMMON = {"model", "config", "verbose", "quiet", "help", "version", "device", "dtype", "offline"}
COMMON |= {"max-model-len", "gpu-memory-utilization", "spec", "num-spec-tokens", "threads"}
COMMON |= {"kv-dtype", "numerics", "tensor-parallel-size", "expert-parallel"}
COMMON |= {"data-parallel-attention"}


def texts(table):
    return [line.split("  ")[-1] for line in table.splitlines()]


def test_the_example_ranks_as_shown(default_model, tmp_path, monkeypatch, capsys):
    """By the command and in Python; the order of a near tie may depend on the processor's sums."""
    (tmp_path / "query.txt").write_text(QUERY)
    (tmp_path / "reviews.txt").write_text(REVIEWS)
    process = tiercel(
        "score", "--query", "@query.txt", "--items", "reviews.txt", "--suffix", "\nSentiment:",
        "--labels", " positive, negative", "--normalize", "labels", cwd=tmp_path,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    (shown,) = (text for kind, text in BLOCKS if not kind)
    head, *expected = texts(shown)
    assert head == "text"
    told = texts(process.stdout)[1:]
    assert set(told) == set(expected) == set(REVIEWS.splitlines())
    assert told[:3] == expected[:3]
    (code,) = (text for kind, text in BLOCKS if kind == "python")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/scoring.md", "exec"), {})
    assert texts(capsys.readouterr().out)[:3] == expected[:3]


def test_the_lines_example(default_model):
    command = next(text for kind, text in BLOCKS if kind == "sh" and text.startswith("echo"))
    line = re.search(r"'(.*)'", command)[1]
    process = tiercel("score", stdin=line + "\n", env=environment())
    assert process.returncode == 0, process.stderr
    assert '"order": [' in process.stdout


def test_every_option_is_explained():
    explained = set(re.findall(r"--([a-z][a-z-]*)", PAGE))
    arguments = make_app()["score"].assemble_argument_collection()
    names = {n[2:] for argument in arguments for n in argument.names if n.startswith("--")}
    names = {name for name in names if not name.startswith("no-")}
    assert names - COMMON <= explained <= names
