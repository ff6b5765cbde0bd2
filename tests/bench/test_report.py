"""Results survive saving and loading, are compared only with their like, and print well."""

import json
import re

import msgspec
import pytest

from tests.bench.reports import SHAPE, level, report
from tiercel.bench import compare, plot, tables
from tiercel.bench import report as reports
from tiercel.bench.files import save
from tiercel.bench.report import Load
from tiercel.bench.statistics import Bounds
from tiercel.bench.workload import Lengths
from tiercel.errors import ArgumentError

RATES = (Load(4, rate=0.5), Load(4, rate=2.0))


def changed(struct, **changes):
    return msgspec.structs.replace(struct, **changes)


def test_a_result_survives_the_disk(tmp_path):
    path = tmp_path / "new" / "r.json"
    original = report(loads=(Load(4, concurrency=2), *RATES))
    save(original, path)
    assert reports.load(path) == original
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]
    values = json.loads(path.read_text())
    assert values["levels"][0]["load"] == {"requests": 4, "concurrency": 2}
    assert values["levels"][1]["samples"][3]["piece_s"] == pytest.approx([0.2, 0.4, 0.6, 0.8])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not a result of tiercel bench"),
        (b"[]", "is not a result"),
        (b'{"format": 1}', "missing required field"),
        (b"[" * 100_000, "is not a result"),
    ],
)
def test_files_that_hold_no_result(tmp_path, data, words):
    path = tmp_path / "r.json"
    path.write_bytes(data)
    with pytest.raises(ArgumentError, match=words):
        reports.load(path)


def test_another_format_is_refused(tmp_path):
    path = tmp_path / "r.json"
    save(changed(report(), format=2), path)
    with pytest.raises(ArgumentError, match="has format 2"):
        reports.load(path)


def test_ratios():
    figures = compare.compare(report(2.0), report(1.0))
    found = {(figure.load, figure.title): figure for figure in figures}
    rate = found["8 at once", "output tokens/s"]
    assert (rate.first, rate.second, rate.ratio) == pytest.approx((4.0, 8.0, 2.0))
    first = found["1 at once", "first token p50, ms"]
    assert (first.first, first.second, first.ratio) == pytest.approx((200.0, 100.0, 0.5))
    assert found["1 at once", "inter-token mean, ms"].ratio == pytest.approx(0.5)
    assert found["1 at once", "gap p99, ms"].first == pytest.approx(200.0)
    assert found["1 at once", "errors"].ratio is None  # 0 of 0
    assert not any(title.startswith("goodput") for _, title in found)


def test_a_result_without_pieces_compares_where_it_can():
    offline = report(1.0, kind="throughput")
    offline = changed(
        offline,
        levels=[level(old.load, 1.0, piece_s=[]) for old in offline.levels],
    )
    figures = {(f.load, f.title): f for f in compare.compare(report(), offline)}
    assert figures["1 at once", "gap mean, ms"].second is None
    assert figures["1 at once", "gap mean, ms"].ratio is None
    assert figures["1 at once", "output tokens/s"].ratio == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload": changed(SHAPE, input_len=Lengths(8, 17))}, "input_len is 8:16 and 8:17"),
        ({"workload": changed(SHAPE, output_len=Lengths(5, 5))}, "output_len is 4:4 and 5:5"),
        ({"workload": changed(SHAPE, seed=2)}, "seed is 1 and 2"),
        ({"workload": changed(SHAPE, temperature=1.0)}, "temperature is 0.0 and 1.0"),
        ({"workload": changed(SHAPE, token_ids=None)}, "token_ids is 10:20 and None"),
        ({"bounds": Bounds(latency_ms=5)}, "latency_ms is None and 5"),
        ({"loads": (Load(4, concurrency=1),)}, "loads is"),
        ({"loads": (Load(4, concurrency=1), Load(5, concurrency=8))}, "5 requests, 8 at once"),
        ({"loads": (Load(4, concurrency=1), Load(4, rate=8.0))}, "4 requests, 8/s"),
        ({"is_partial": True}, "is_partial is False and True"),
    ],
)
def test_different_shapes_are_refused(changes, words):
    with pytest.raises(ArgumentError, match=re.escape(words)) as caught:
        compare.compare(report(), report(**changes))
    assert "\n" not in str(caught.value)


def test_other_models_and_servers_may_be_compared():
    other = report(model="another", target={"url": "http://x"}, hardware={"cpu": "B"})
    assert compare.compare(report(), other)


def test_the_table_has_a_column_for_each_load():
    table = tables.level_table(report(loads=(Load(4, concurrency=1), *RATES)))
    assert table[0] == ["", "1 at once", "0.5/s", "2/s"]
    cells = {row[0]: row[1:] for row in table}
    assert cells["output tokens/s"] == ["16.0", "8.0", "5.3"]
    assert cells["end to end p90, ms"] == ["400.00", "800.00", "1,200.00"]
    lines = tables.plain(table).splitlines()
    assert len({line.rindex(cell[-1][-1]) for line, cell in zip(lines, table, strict=True)}) == 1


def test_the_comparison_table():
    a, b = report(2.0), report(1.0)
    ((title, table), (other, _)) = tables.comparison_tables(a, b, compare.compare(a, b))
    assert (title, other) == ("1 at once", "8 at once")
    assert table[0] == ["", "engine 2", "engine 1", "ratio"]
    assert ["output tokens/s", "8.0", "16.0", "2.000"] in table
    assert ["errors", "0", "0", "-"] in table


def test_what_a_reader_must_know_is_noted():
    failed = level(Load(4, concurrency=1), 1.0, error="http_429", detail="queue is full")
    short = level(Load(4, concurrency=2), 1.0, output_len=9, cached_tokens=6)
    late = level(Load(4, rate=3.0), 1.0, due_s=-0.5)
    busy = changed(late, summary=changed(late.summary, client_load=0.97, unfinished=2, late=None))
    found = tables.notes(report(levels=[failed, short, late, busy], is_partial=True))
    assert found == [
        "1 at once: 4 requests failed: http_429: queue is full.",
        "2 at once: 4 answers are shorter than requested.",
        "2 at once: 50% of the prompt tokens came from a prefix cache; another --seed avoids it.",
        "3/s: requests were sent late: p99 500 ms.",
        "3/s: 2 requests were cut off.",
        "3/s: the client used 97% of a core: its own work is in the figures.",
        "Interrupted: the result is partial.",
    ]
    assert tables.notes(report()) == []


def test_the_figure(tmp_path):
    loads = (Load(4, concurrency=1), Load(4, concurrency=8), *RATES)
    found = [report(1.0, loads=loads), report(2.0, loads=loads)]
    path = tmp_path / "new" / "a.svg"
    plot.draw(found, path)
    text = path.read_text()
    for words in (
        *("concurrent requests", "requests sent per second", "output tokens per second"),
        *("time to first token, ms", "time per token, ms", "engine 1 p50", "engine 2 p99"),
        "a model; prompts of 8 to 16 tokens, answers of 4; measured from: A CPU, 2 cores",
    ):
        assert f">{words}</text>" in text
    colours = set(re.findall(r"#([0-9a-f]{6})\b", text))
    assert colours
    assert all(c[:2] == c[2:4] == c[4:] for c in colours)  # readable in greyscale: it is grey
    plot.draw(found, tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == text


@pytest.mark.parametrize("ending", ["png", "pdf"])
def test_other_kinds_of_figure(tmp_path, ending):
    plot.draw([report()], tmp_path / f"a.{ending}")
    assert (tmp_path / f"a.{ending}").stat().st_size > 1000


def test_figures_that_cannot_be_drawn(tmp_path):
    with pytest.raises(ArgumentError, match=r"written as \.jpg"):
        plot.draw([report()], tmp_path / "a.jpg")
    with pytest.raises(ArgumentError, match="no level to plot"):
        plot.draw([report(loads=())], tmp_path / "a.svg")
    failed = level(Load(4, concurrency=1), 1.0, error="timeout", piece_s=[])
    plot.draw([report(levels=[failed])], tmp_path / "a.svg")  # gaps where nothing was measured
