"""A small report whose figures are all different."""

from tiercel.bench.completions import Sample
from tiercel.bench.report import Level, Load, Report
from tiercel.bench.statistics import Bounds, summarise
from tiercel.bench.workload import Lengths, Workload

SHAPE = Workload(Lengths(8, 16), Lengths(4, 4), seed=1, token_ids=Lengths(10, 20))


def sample(index, scale, **kwargs):
    pieces = [scale * step for step in (0.1, 0.2, 0.3, 0.4)]
    fields = {
        "start_s": 0.0,
        "output_len": 4,
        "first_s": pieces[0],
        "latency_s": pieces[-1],
        "piece_s": pieces,
        "prompt_tokens": 12,
        "completion_tokens": 4,
    }
    return Sample(index, **(fields | kwargs))


def level(load, scale, **kwargs):
    samples = [sample(index, scale, **kwargs) for index in range(4)]
    return Level(load, summarise(samples, scale, bounds=Bounds()), samples)


LOADS = (Load(4, concurrency=1), Load(4, concurrency=8))


def report(scale=1.0, loads=LOADS, **changes):
    fields = {
        "kind": "serve",
        "command": "tiercel bench serve http://h",
        "utc": "2026-01-01T00:00:00Z",
        "label": f"engine {scale:g}",
        "versions": {"python": "3"},
        "hardware": {"cpu": "A CPU", "cores": "2"},
        "target": {"url": "http://h"},
        "model": "a model",
        "model_sha256": None,
        "workload": SHAPE,
        "bounds": Bounds(),
        "is_partial": False,
        "levels": [level(load, scale * (index + 1)) for index, load in enumerate(loads)],
    }
    return Report(**(fields | changes))
