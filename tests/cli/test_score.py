"""`tiercel score`: sources of queries and items, the table, JSON lines, bad lines."""

import io
import json
import shlex
import sys

import numpy as np
import pytest

from tests.cli.harness import error_line, tiercel
from tests.tiny_llm import LLAMA, open_tiny
from tiercel.cli.main import _EXAMPLES, run

QUERY = "so said "
ITEMS = ["the thin man", "a", "in 2024 they ran", "é😀"]
LABELS = [" ran", " a"]


@pytest.fixture(scope="module")
def expected():
    with open_tiny() as llm:
        return llm.score(QUERY, ITEMS, LABELS)


@pytest.fixture
def score(capsys):
    """Runs the command on the tiny model; returns both its outputs."""

    def call(*arguments, status=0):
        common = ("--model", str(LLAMA), "--device", "cpu", "--dtype", "float32")
        assert run(["score", *common, *map(str, arguments)]) == status
        return capsys.readouterr()

    return call


@pytest.fixture
def items(tmp_path):
    path = tmp_path / "items.txt"
    path.write_text("\n".join([*ITEMS, "", ""]))
    return path


def best_first(expected):
    return np.argsort(-expected.probs[:, 0], kind="stable").tolist()


def test_the_table_is_sorted_by_the_first_label(score, items, expected):
    captured = score("--query", QUERY, "--items", items, "--labels", ",".join(LABELS))
    head, *rows = captured.out.splitlines()
    assert head.split() == ["item", "ran", "a", "text"]
    order = best_first(expected)
    assert [int(row.split()[0]) - 1 for row in rows] == order
    for row, number in zip(rows, order, strict=True):
        cells = row.split(maxsplit=3)
        assert cells[3] == ITEMS[number]
        shown = [float(cell) for cell in cells[1:3]]
        np.testing.assert_allclose(shown, expected.probs[number], rtol=0.05, atol=5e-5)
    assert captured.err.startswith("4 items in ")
    assert captured.err.count("\n") == 1


def test_small_shares_are_not_shown_as_0(score, items, monkeypatch):
    with open_tiny() as llm:
        real = llm.score(QUERY, ITEMS, LABELS)
    real.probs[:] = [[1.0, 0.0], [0.5, 4.9e-5], [0.25, 6e-5], [1.2e-7, 1e-30]]
    monkeypatch.setattr("tiercel.llm.LLM.score", lambda *_args, **_options: real)
    captured = score("--query", QUERY, "--items", items, "--labels", ",".join(LABELS))
    rows = [row.split(maxsplit=3)[1:3] for row in captured.out.splitlines()[1:]]
    assert rows == [
        ["1.0000", "0.0000"], ["0.5000", "4.9e-05"], ["0.2500", "0.0001"], ["1.2e-07", "1.0e-30"],
    ]  # fmt: skip


def test_the_table_of_the_example_in_help_has_shares_of_the_labels(score, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("apple\nhammer\n")
    command, *arguments = shlex.split(_EXAMPLES["score"][0])[1:]
    assert command == "score"
    rows = [row.split() for row in score(*arguments).out.splitlines()[1:]]
    assert len(rows) == 2
    for row in rows:
        assert float(row[1]) + float(row[2]) == pytest.approx(1, abs=2e-4)


def test_json_tells_all(score, items, expected, tmp_path):
    (tmp_path / "q.txt").write_text(QUERY + "\n")
    lines = tmp_path / "items.jsonl"
    lines.write_text("".join(json.dumps({"text": text, "id": 5}) + "\n" for text in ITEMS))
    captured = score(
        "--query", f"@{tmp_path / 'q.txt'}", "--items", lines, "--labels", ",".join(LABELS),
        "--json", "--top", "3", "--quiet",
    )  # fmt: skip
    told = json.loads(captured.out)
    assert captured.err == ""
    assert (told["query"], told["labels"]) == (QUERY, LABELS)
    assert [result["index"] for result in told["results"]] == best_first(expected)[:3]
    for result in told["results"]:
        number = result["index"]
        assert result["text"] == ITEMS[number]
        assert result["error"] is None
        np.testing.assert_allclose(
            result["logprobs"], expected.logprobs[number], atol=1e-4, equal_nan=False
        )
        np.testing.assert_allclose(
            result["probs"], expected.probs[number], atol=1e-6, equal_nan=False
        )
    usage = expected.usage
    assert told["usage"] == {
        "prompt_tokens": usage.prompt_tokens, "cached_tokens": 0, "mode": "packed",
    }  # fmt: skip


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_item(score, tmp_path):
    for form, text in (("lines", "a\nb\n"), ("json", '{"text": "a"}\n{"text": "b"}\n')):
        (tmp_path / form).write_text(text, encoding="utf-8-sig")
        told = score("--query", "@" + str(tmp_path / form), "--items", tmp_path / form,
                     "--labels", "b,c", "--json", "--quiet")  # fmt: skip
        assert {result["text"] for result in json.loads(told.out)["results"]} == {"a", "b"}
        assert json.loads(told.out)["query"] == text.removesuffix("\n")


def test_shares_among_the_labels_and_a_suffix(score, items):
    captured = score(
        "--query", QUERY, "--items", items, "--labels", ",".join(LABELS),
        "--suffix", " then", "--normalize", "labels", "--json", "--quiet",
    )  # fmt: skip
    with open_tiny() as llm:
        expected = llm.score(QUERY, ITEMS, LABELS, suffix=" then", normalize="labels")
    for result in json.loads(captured.out)["results"]:
        assert sum(result["probs"]) == pytest.approx(1.0)
        own = expected.logprobs[result["index"]]
        np.testing.assert_allclose(result["logprobs"], own, atol=1e-4)


def test_a_long_item_is_said_and_the_others_are_scored(score, tmp_path):
    path = tmp_path / "items.txt"
    path.write_text("a\n" + "x" * 90 + "\nb\n")
    common = ("--query", QUERY, "--items", path, "--labels", "a,b", "--max-model-len", "40")
    captured = score(*common, "--json")
    results = json.loads(captured.out)["results"]
    assert [result["index"] for result in results][-1] == 1
    assert results[-1]["probs"] == [None, None]
    assert "items[1] has" in results[-1]["error"]
    assert "item 2: items[1] has" in captured.err
    assert "items[1] has" in score(*common, "--long-items", "refuse", status=1).err
    assert "nan" not in score(*common, "--long-items", "cut").out


LINES = [
    {"query": QUERY, "items": ITEMS, "labels": LABELS},
    {"query": "x", "items": ["a", 3]},
    "no json",
    {"query": "x", "items": ["a"], "label": ["b"]},
    {"items": ["a"]},
    {"query": [5, 6], "items": [[7], [8, 9]], "label_token_ids": [3], "normalize": "vocab"},
    [1],
    {"query": "x", "items": "a"},
]


def as_text(line):
    return line if isinstance(line, str) else json.dumps(line)


@pytest.mark.parametrize("from_file", [True, False])
def test_json_lines_keep_their_order_and_bad_ones_their_place(
    score, expected, tmp_path, monkeypatch, from_file
):
    text = "\n".join(map(as_text, LINES)) + "\n\n"
    arguments = ["--labels", "b,c"]
    if from_file:
        (tmp_path / "lines.jsonl").write_text(text)
        arguments += ["--file", str(tmp_path / "lines.jsonl")]
    else:
        stream = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stream)
    captured = score(*arguments, status=1)
    answers = [json.loads(line) for line in captured.out.splitlines()]
    assert len(answers) == len(LINES)
    np.testing.assert_allclose(
        answers[0]["logprobs"], expected.logprobs, atol=1e-4, equal_nan=False
    )
    assert answers[0]["order"] == best_first(expected)
    messages = [answer.get("error", {}).get("message") for answer in answers]
    assert [message is None for message in messages] == [
        True, False, False, False, False, True, False, True,
    ]  # fmt: skip
    for number, part in (
        (1, "query is text but items[1] is not"),
        (2, "not JSON"),
        (3, "'label' is not a field"),
        (4, "query is missing"),
        (6, "not a JSON object"),
    ):
        assert part in messages[number]
    assert np.shape(answers[5]["scores"]) == (2, 1)
    assert np.shape(answers[7]["scores"]) == (1, 2)
    assert captured.err.startswith("7 items in ")


def test_good_lines_alone_end_well(score, tmp_path):
    (tmp_path / "lines.jsonl").write_text(as_text(LINES[0]))
    score("--file", tmp_path / "lines.jsonl")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--query", "q"], "--items: is missing"),
        (["--items", "ITEMS", "--labels", "a"], "--query: is missing"),
        (["--query", "q", "--items", "ITEMS"], "--labels: is missing"),
        (["--query", "q", "--items", "ITEMS", "--labels", "a", "--file", "x"], "--file: excludes"),
        (["--query", "q", "--items", "ITEMS", "--labels", "a", "--top", "0"], "--top 0"),
        (["--query", "q", "--items", "EMPTY", "--labels", "a"], "has no items"),
        (["--query", "q", "--items", "MIXED", "--labels", "a"], "line 2 is not a JSON object"),
        (["--query", "q", "--items", "BYTES", "--labels", "a"], "byte 1 is not valid UTF-8"),
        (["--normalize", "all"], "all"),
    ],
    ids=str,
)
def test_wrong_use_is_one_line(score, items, tmp_path, arguments, part):
    files = {"EMPTY": b" \n\n", "MIXED": b'{"text": "a"}\nb\n', "BYTES": b"a\xff"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    paths = {name: str(tmp_path / name) for name in files} | {"ITEMS": str(items)}
    captured = score(*(paths.get(argument, argument) for argument in arguments), status=2)
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    assert part in captured.err


def test_wrong_labels_are_one_line(score, items):
    captured = score("--query", "q", "--items", items, "--labels", "a,a", status=1)
    assert "labels holds 'a' twice" in captured.err


def test_a_file_that_is_missing(tmp_path):
    missing = tmp_path / "none.txt"
    process = tiercel("score", "--query", "q", "--items", missing, "--labels", "a")
    assert "none.txt" in error_line(process)
