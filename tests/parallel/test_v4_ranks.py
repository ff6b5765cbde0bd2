"""The benchmark of shared models, on ranks of two processes and on one by itself."""

from dataclasses import replace

import pytest
import torch

from benchmarks import v4_ranks
from benchmarks.figures import read
from benchmarks.v4_ranks import Job, Lone
from tests.parallel.ranks import RankError

CPU = torch.device("cpu")


def job(model, out=None, **changes):
    fields = {
        "num_gpus": 2, "num_layers": 1, "expert_parallel": False, "is_alone": False,
        "device_type": "cpu", "requests": (1, 2), "has_prompt": False, "has_kernels": False,
    }  # fmt: skip
    return Job(model=model, out=out, **(fields | changes))


def rows_of(group, task):
    torch.manual_seed(0)
    return v4_ranks.measure(task, group, CPU)


@pytest.mark.parametrize("model", ["flash", "qwen3-8b"])
def test_ranks_are_timed_and_agree(two_ranks, tmp_path, model):
    """`measure` stops where ranks have other bits."""
    task = job(model, tmp_path / "figures.json", expert_parallel=model == "flash")
    (rate, *steps), _ = two_ranks.run(rows_of, task)
    assert rate["read_gbps"] > 0
    assert [f"{row['name'].split(', ')[2]}" for row in steps] == ["1 requests", "2 requests"]
    for row in steps:
        assert row["floor_ms"] > 2 * row["attention_sum_us"] / 1e4
        assert row["step_ms"] > 0
    assert len(read(tmp_path / "figures.json").rows) == 3


def test_ranks_with_requests_of_their_own_are_timed(two_ranks, tmp_path):
    """The requests are shared out; each rank's rows are other ones."""
    task = job("flash", tmp_path / "figures.json", has_own_requests=True, requests=(4,))
    first, second = two_ranks.run(rows_of, task)
    (_, step), (_, other) = first, second
    assert step["name"].split(", ")[2] == "4 requests"
    assert (step["requests_per_gpu"], step["experts"]) == (2, "whole")
    assert step["floor_ms"] > (step["gather_us"] + step["scatter_us"]) / 1e3
    assert step["bytes_per_rank"] == other["bytes_per_rank"]
    alone = replace(task, is_alone=True, out=None)
    _, found = rows_of(Lone(0, 2), alone)
    assert found["weight_bytes_per_rank"] == step["weight_bytes_per_rank"]


def test_kernels_of_a_step_are_listed():
    task = job("qwen3-8b", num_gpus=1, is_alone=True, requests=(1,), has_kernels=True)
    _, step, *kernels = rows_of(Lone(0, 1), task)
    assert all(row["name"].startswith(f"{step['name']}: aten::") for row in kernels)
    assert kernels[0]["step_us"] >= kernels[-1]["step_us"] >= 0
    assert kernels[0]["calls"] >= 1


def test_one_of_two_ranks_alone_reads_half():
    sizes = {}
    for count in (1, 2):
        task = job("qwen3-8b", num_gpus=count, is_alone=True, requests=(1,))
        _, step = rows_of(Lone(0, count), task)
        sizes[count] = step["weight_bytes_per_rank"]
    assert sizes[1] > 1.9 * sizes[2]


def test_a_rank_that_computes_something_else_is_not_timed(two_ranks):
    """Bits are compared before anything is timed."""
    with pytest.raises(RankError, match="other bits than another rank"):
        two_ranks.run(differ)


def differ(group):
    try:
        v4_ranks.check_bits(group, torch.full((5, 3), float(group.rank)))
    except SystemExit as error:
        raise AssertionError(str(error)) from None


def test_gpus_that_are_not_there_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(v4_ranks, "run", lambda _: pytest.fail("no rank is started"))
    monkeypatch.setattr("sys.argv", ["v4_ranks", "--gpus", "64"])
    with pytest.raises(SystemExit):
        v4_ranks.main()
    assert "--gpus 64 needs 64 GPUs, and here are " in capsys.readouterr().err
