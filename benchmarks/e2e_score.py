"""Items per second after a shared query, compared with separate scoring and the roofline.

    python -m benchmarks.synthetic_model qwen3-8b qwen3-8b.gguf
    python -m benchmarks.e2e_score qwen3-8b.gguf --out score.json
    python -m benchmarks.e2e_score_plot score_a.json score_b.json docs/score.svg

For each length of query and of list, items of 30 tokens, two labels over the whole vocabulary:

    cold      the query is new, so none of it is in the prefix cache
    cached    the query was scored before
    separate  each item as a separate prompt, all given to the engine together, query cached
    one by one  a call per item, query cached

Roofline: 2 operations per weight outside embedding and head for every new token, the head's for
every item, attention's for every visible pair, all at 790 TFLOP/s, which a bf16 product of 8192^3
reaches on an H200 after an idle time. The rate at its power limit is measured in the run.

Load: some callers each score list after list on one engine; the percentiles are those of a call,
with its queue. "How many items per second under a limit of the 99th percentile" is the best level
that meets the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import environment
from benchmarks.figures import save
from tiercel import LLM, AsyncLLM
from tiercel.request.score_task import ScoreRead, ScoreTask

ITEM_LEN = 30
LABELS = [11, 222]
PEAK_TFLOPS = 790.0
PREFIXES = (300, 512, 1000, 2000)
LISTS = (10, 32, 128, 500)
LOAD_PREFIX, LOAD_ITEMS, LOAD_QUERIES = 512, 32, 16
CALLERS = (1, 2, 4, 8, 16, 32)
LIMITS_MS = (50, 100, 200, 500)
BLOCK = 64  # a cached query ends at a block
Lists = list[list[int]]


def make_ids(seed: int, length: int) -> list[int]:
    """Random byte tokens: a synthetic vocabulary begins with them."""
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


def make_items(count: int) -> Lists:
    return [make_ids(10**6 + i, ITEM_LEN) for i in range(count)]


def best_seconds(run: Callable[[], object], seconds: float) -> tuple[float, int]:
    """Median time of a call, and the number of calls, after three that warm up."""
    for _ in range(3):  # graphs are captured in the second
        run()
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < 3 or (time.perf_counter() - began < seconds and len(samples) < 50):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples), len(samples)


def score_apart(llm: LLM, query: list[int], items: Lists) -> None:
    """Score each item as an ordinary prompt, read at its last token."""
    read = ((ScoreRead(0, tuple(LABELS)),),)
    requests = [llm._inputs.score_request([*query, *x], ScoreTask((), read)) for x in items]
    for _ in llm._steps(requests, lambda *_: None):
        pass


class Roofline:
    """The least time of a call, by arithmetic."""

    def __init__(self, llm: LLM) -> None:
        self._config = llm.source.config

    def seconds(self, prefix: int, items: int, *, is_cached: bool) -> float:
        """The least time of one list."""
        config = self._config
        width = config.num_heads * config.head_dim
        wide = width + 2 * config.num_kv_heads * config.head_dim
        layer = config.hidden_size * (wide + width + 3 * config.intermediate_size)
        computed = 0 if is_cached else prefix
        pairs = items * (ITEM_LEN * prefix + ITEM_LEN * (ITEM_LEN + 1) // 2)
        pairs += computed * (computed + 1) // 2
        flops = 2 * config.num_layers * layer * (computed + items * ITEM_LEN)
        flops += 4 * width * config.num_layers * pairs
        flops += 2 * config.hidden_size * config.vocab_size * items
        return flops / PEAK_TFLOPS / 1e12


def gemm_tflops() -> float:
    """The rate of a bf16 product in its steady state."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in "ab")
    out = torch.empty_like(a)

    def run() -> None:
        for _ in range(20):
            torch.mm(a, b, out=out)
        torch.cuda.synchronize()

    return 20 * 2 * 8192**3 / best_seconds(run, 0.3)[0] / 1e12


def measure(
    llm: LLM, roofline: Roofline | None, prefix: int, count: int, seconds: float
) -> dict[str, Any]:
    """One length of query and list in all ways."""
    items, seeds = make_items(count), itertools.count(1000 * prefix + count)
    query = make_ids(prefix, prefix)

    def score(query: list[int], items: Lists) -> None:
        llm.score(query, items, label_token_ids=LABELS)

    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "cold": (count, lambda: score(make_ids(next(seeds), prefix), items)),
        "cached": (count, lambda: score(query, items)),
        "separate": (count, lambda: score_apart(llm, query, items)),
        "one_by_one": (4, lambda: [score(query, [item]) for item in items[:4]]),
    }
    row: dict[str, Any] = {"prefix": prefix, "items": count, "item_len": ITEM_LEN}
    for name, (scored, run) in ways.items():
        taken, calls = best_seconds(run, seconds)
        row[f"{name}_items_per_s"] = scored / taken
        row[f"{name}_ms"], row[f"{name}_calls"] = 1e3 * taken, calls
    for name in ("cold", "cached") if roofline is not None else ():
        # A hit ends at a block's end; tokens after it are computed, and are not necessary work.
        least = roofline.seconds(prefix, count, is_cached=name == "cached")
        row[f"{name}_roofline_items_per_s"] = count / least
        row[f"{name}_of_roofline"] = 1e3 * least / row[f"{name}_ms"]
    row["cached_over_separate"] = row["cached_items_per_s"] / row["separate_items_per_s"]
    row["cached_over_one_by_one"] = row["cached_items_per_s"] / row["one_by_one_items_per_s"]
    return {key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()}


async def run_callers(llm: AsyncLLM, callers: int, prefix: int, seconds: float) -> dict[str, float]:
    """Callers who each score one list after the other, with queries from a cached set."""
    queries = [make_ids(i, prefix) for i in range(LOAD_QUERIES)]
    items = make_items(4 * LOAD_ITEMS)
    taken: list[float] = []
    end = time.perf_counter() + seconds

    async def call(number: int) -> None:
        for turn in itertools.count(number):
            start = time.perf_counter()
            if start >= end:
                return
            own = items[turn % 3 * LOAD_ITEMS :][:LOAD_ITEMS]
            query = queries[turn % LOAD_QUERIES]
            await llm.score(query, own, label_token_ids=LABELS)
            taken.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(call(number) for number in range(callers)))
    passed = time.perf_counter() - start
    p50, p99 = np.percentile(taken, (50, 99))
    return {
        "callers": callers,
        "calls": len(taken),
        "items_per_s": round(LOAD_ITEMS * len(taken) / passed, 1),
        "p50_ms": round(1e3 * p50, 2),
        "p99_ms": round(1e3 * p99, 2),
    }


async def measure_load(path: Path, options: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    """Levels of load, and the best of those that meet each limit."""
    prefix = min(LOAD_PREFIX, options["max_model_len"] // 2)
    async with AsyncLLM(path, **options) as llm:
        await run_callers(llm, 4, prefix, seconds / 2)
        levels = [await run_callers(llm, callers, prefix, seconds) for callers in CALLERS]
    best = []
    for limit in LIMITS_MS:
        rates = [x["items_per_s"] for x in levels if x["p99_ms"] <= limit]
        best.append({"most_p99_ms": limit, "items_per_s": max(rates, default=0.0)})
    shape = {"model": path.stem, "prefix": prefix, "items": LOAD_ITEMS, "queries": LOAD_QUERIES}
    return [{"name": "load", **shape, **row} for row in levels + best]


def report(row: dict[str, Any]) -> None:
    rates = ", ".join(
        f"{name} {row[f'{name}_items_per_s']:.0f}"
        for name in ("cold", "cached", "separate", "one_by_one")
    )
    shares = ", ".join(
        f"{name} {row[f'{name}_of_roofline']:.0%}"
        for name in ("cold", "cached")
        if f"{name}_of_roofline" in row
    )
    print(
        f"P {row['prefix']}, {row['items']} items: {rates} items/s; of roofline: {shares}; "
        f"cached {row['cached_ms']:.2f} ms",
        flush=True,
    )


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prefixes", type=int, nargs="*", default=PREFIXES)
    parser.add_argument("--lists", type=int, nargs="*", default=LISTS)
    parser.add_argument("--step-tokens", type=int, default=16_384)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one measurement, about")
    parser.add_argument("--load", action="store_true", help="levels of load too")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--max-model-len", type=int, default=4096)
    options = parser.parse_args()
    engine = {"max_model_len": options.max_model_len, "max_num_batched_tokens": options.step_tokens}
    rows: list[dict[str, Any]] = []
    with LLM(options.model, **engine) as llm:
        head = environment(llm.config.device)
        roofline = None
        if llm.config.device.type == "cuda":
            rows.append({"name": "matrix products", "gemm_tflops": round(gemm_tflops(), 1)})
            roofline = Roofline(llm)
        for prefix, count in itertools.product(options.prefixes, options.lists):
            row = measure(llm, roofline, prefix, count, options.seconds)
            report(row)
            rows.append({"name": "list", "model": options.model.stem, **engine, **row})
            save(options.out, head, rows)
    if options.load:
        seconds = max(1.0, 4 * options.seconds)
        loads = asyncio.run(measure_load(options.model, engine, seconds))
        print(*loads, sep="\n", flush=True)
        save(options.out, head, rows + loads)


if __name__ == "__main__":
    main()
