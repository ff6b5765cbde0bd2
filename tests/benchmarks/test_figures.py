"""Result files: accepted contents, summaries of samples, and the committed files."""

import json
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import figures

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks/results").iterdir())
HEAD = {
    "command": "python -m benchmarks.act_mul",
    "revision": "695d571",
    "date": "2026-11-21T13:34:37Z",
    "hardware": {"gpu": "NVIDIA H200", "multiprocessors": 132},
    "versions": {"torch": "2.11.0+cu130"},
}
ROWS = [{"name": "rows=3", "median_us": 1.25, "samples": 7, "same_bits": True, "peer": None}]


def test_kept_files():
    """All are JSON files of the schema, as the writer writes them, and within its size limit."""
    for path in RESULTS:
        assert path.suffix == ".json"
        kept = figures.read(path)
        assert kept.rows, path
        assert path.read_text().count("\n") <= figures.MAX_LINES <= 2000, path


def test_what_is_saved_is_read(tmp_path):
    path = tmp_path / "new" / "figures.json"
    figures.save(path, HEAD | {"notes": "x"}, ROWS)
    assert msgspec.to_builtins(figures.read(path)) == HEAD | {"notes": "x", "rows": ROWS}
    assert sum(line.startswith("  {") for line in path.read_text().splitlines()) == len(ROWS)


def test_nothing_is_saved_without_a_path():
    figures.save(None, {}, [])


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        *(({name: None}, ROWS) for name in HEAD),
        ({"command": ""}, ROWS),
        ({"revision": "main"}, ROWS),
        ({"revision": "695d571 or so"}, ROWS),
        ({"date": "21 November"}, ROWS),
        ({"hardware": {}}, ROWS),
        ({"versions": {}}, ROWS),
        ({"versions": {"torch": "unknown"}}, ROWS),  # no notes say why
        ({"revision": "unknown"}, ROWS),
        ({"extra": 1}, ROWS),
        ({}, []),
        ({}, [{}]),
        ({}, [{"median_us": float("nan")}]),
        ({}, [{"median_us": float("inf")}]),
        ({}, [{"median": 1.25}]),  # no unit
        ({}, [{"decode batch 8": 1}]),
        ({}, [{"name": f"row {i}", "us": 1.0} for i in range(figures.MAX_LINES)]),
        ({}, [{"name": "x" * figures.MAX_BYTES}]),
    ],
)
def test_refused(changes, rows, tmp_path):
    head = {name: value for name, value in (HEAD | changes).items() if value is not None}
    with pytest.raises((msgspec.ValidationError, ValueError)):
        figures.save(tmp_path / "figures.json", head, rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("median_us", "median"),
        ("695d571", "main"),
        (' "versions": {"torch": "2.11.0+cu130"},\n', ""),
        ('"rows"', '"results"'),
        ("[", "[ "),  # not as the writer formats it
        ("}\n ]", "},\n  {}\n ]"),
    ],
)
def test_what_was_changed_by_hand_is_not_read(old, new, tmp_path):
    path = tmp_path / "figures.json"
    figures.save(path, HEAD, ROWS)
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    with pytest.raises((msgspec.ValidationError, ValueError)):
        figures.read(path)


def test_unknown_values_need_notes(tmp_path):
    head = HEAD | {"revision": "unknown", "notes": "The revision was not kept."}
    figures.save(tmp_path / "figures.json", head, ROWS)


def test_flat_rows_keep_what_sums_a_list_up():
    times = [random.Random(5).uniform(1, 9) for _ in range(13)]
    row = figures.flat(
        {"a": 1, "b": {"c": "x", "d": {"e_us": 2.5}}, "t_us": times, "n": ["y", "z"]}
    )
    assert row.pop("t_us_median") == statistics.median(times)
    assert (row.pop("t_us_min"), row.pop("t_us_max")) == (min(times), max(times))
    assert row == {"a": 1, "b_c": "x", "b_d_e_us": 2.5, "t_us_count": 13, "n": "y, z"}
    assert figures.flat({"t_us": []}) == {"t_us_count": 0}


def test_a_histogram_counts_every_time_once():
    seconds = np.random.default_rng(3).gamma(2.0, 0.01, 257).tolist()
    bars = figures.histogram("gap", seconds)
    assert sum(bar["count"] for bar in bars) == len(seconds)
    for bar in bars[:-1]:  # the last bar has its end
        assert bar["count"] == sum(bar["from_s"] <= x < bar["to_s"] for x in seconds)
    assert figures.histogram("gap", []) == []


def make_sample(index, random, error=None):
    pieces = np.cumsum(random.uniform(0.01, 0.02, 5)).tolist()
    return {
        "index": index,
        "start_s": 0.1 * index,
        "output_len": 5,
        "error": error,
        "first_s": pieces[0],
        "latency_s": pieces[-1],
        "piece_s": pieces,
        "prompt_tokens": 7,
        "completion_tokens": 5,
    }


def make_load(num_samples):
    """The data of a load from `bench serve`."""
    random = np.random.default_rng(11)
    samples = [make_sample(i, random, "http_503" if i == 3 else None) for i in range(num_samples)]
    spread = {"mean": 0.2, "p50": 0.19, "p90": 0.3, "p99": 0.4}
    counts = {"requests": num_samples, "ok": num_samples - 1, "unfinished": 0, "short": 0}
    tokens = {"prompt_tokens": 70, "completion_tokens": 50, "cached_tokens": 0}
    rates = {"request_rate": 3.5, "completion_rate": 17.5, "total_rate": 42.25, "goodput": None}
    times = {"first_token": spread, "inter_token": spread, "gap": spread, "latency": None}
    drafts = {"num_drafts": 9, "num_draft_tokens": 18, "accepted_per_pos": [7, 4]}
    summary = {**counts, **tokens, **rates, **times, "errors": {"http_503": 1}, "drafts": drafts}
    summary |= {"duration_s": 2.5, "late": None, "client_load": 0.08}
    load = {"requests": num_samples, "concurrency": 4}
    return {"load": load, "summary": summary, "samples": samples}


RAW = {
    "command": "tiercel bench serve",
    "utc": "2026-11-23T03:29:30Z",
    "versions": {"python": "3.12.3"},
    "hardware": {"cpu": "AMD EPYC", "cores": "2"},
    "model": "8b",
    "model_sha256": None,
}


def test_a_load_keeps_percentiles_and_histograms(tmp_path):
    raw, out = tmp_path / "raw.json", tmp_path / "out.json"
    raw.write_text(json.dumps(RAW | {"kind": "serve", "levels": [make_load(10)]}))
    command = ["figures", "convert", str(raw), "--revision", "73082d4", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command)
        figures.main()
    kept = figures.read(out)
    assert (kept.command, kept.date) == (RAW["command"], RAW["utc"])
    assert kept.revision == "73082d4"
    row, *bars = kept.rows
    shown = {
        "name": "4 at once",
        "model": "8b",
        "completion_tokens_per_second": 17.5,
        "all_tokens_per_second": 42.25,
        "requests_per_second": 3.5,
        "first_token_p99_s": 0.4,
        "gap_mean_s": 0.2,
        "errors_http_503": 1,
        "client_share_of_a_core": 0.08,
        "drafts_accepted_per_pos_2": 4,
    }
    assert shown.items() <= row.items()
    totals = {}
    for bar in bars:
        totals[bar["name"]] = totals.get(bar["name"], 0) + bar["count"]
    assert totals == {  # 9 answers of 5 pieces; the refused one has no part
        "histogram of first token": 9,
        "histogram of inter-token": 9,
        "histogram of gap": 36,
        "histogram of end to end": 9,
    }


def test_rates_of_trials_and_kernels_are_kept(tmp_path):
    trials = [
        {"trial": {"batch": 1, "prompt_tokens": 512, "steps": 0}, "rates": [3.0, 5.0, 4.5]},
        {"trial": {"batch": 8, "prompt_tokens": 512, "steps": 128}, "rates": [7.0]}
        | {"mean": 7.0, "deviation": 0.0, "floor": 14.0, "ratio": 0.5},
    ]
    cost = {"weight_bytes": 100, "windows": {"0": 36}}
    raw = RAW | {"dtype": "float16", "switches": {"TIERCEL_PDL": "0"}, "cost": cost}
    raw |= {"read_gbps": 4440.5, "tflops": 751.5, "results": trials}
    head, (device, prompt, step) = figures.convert(raw, "c769964")
    assert head["notes"] == "TIERCEL_PDL=0"
    assert device | {"weight_bytes": 100, "read_gbps": 4440.5, "dtype": "float16"} == device
    assert prompt["name"] == "pp512"
    assert prompt["tokens_per_second"] == pytest.approx(12.5 / 3)
    assert (prompt["tokens_per_second_min"], prompt["tokens_per_second_max"]) == (3.0, 5.0)
    assert (step["name"], step["share_of_floor"]) == ("tg128 @ d512 b8", 0.5)
    figures.save(tmp_path / "figures.json", head, [device, prompt, step])
    kernel = {"name": "head", "size": "1", "num_bytes": 9, "us": 2.5, "of_ceiling": 0.5}
    assert figures.convert(raw | {"results": [kernel]}, "c769964")[1][1] == kernel


def test_the_head_of_a_run_is_accepted(tmp_path):
    """In a checkout and outside of one."""
    head = figures.about("python -m benchmarks.x", "2026-11-23T03:29:30Z", {"cpu": "AMD EPYC"})
    assert head["versions"]["torch"]
    figures.save(tmp_path / "here.json", head, ROWS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_git", lambda *_: "")
        head = figures.about(head["command"], head["date"], head["hardware"])
    assert head["revision"] == "unknown"
    figures.save(tmp_path / "outside.json", head, ROWS)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_changed_sources_show_in_the_revision(tmp_path, monkeypatch):
    """But a file that a benchmark is writing does not count."""
    names = ("tiercel/env.py", "benchmarks/figures.py", "benchmarks/results/x.json", "README.md")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    author = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    at = figures.revision()
    shown = []
    for name in names:
        (tmp_path / name).write_text("2")
        shown.append(figures.revision() == f"{at} with changes")
        (tmp_path / name).write_text("1")
    assert shown == [True, True, False, False]
    assert figures.revision() == at
