"""Prompts with a common prefix, one answer token each: one request compared with one by one.

    python -m benchmarks.e2e_shared_lists --out benchmarks/results/e2e_shared_lists.json

A reranker sends 64 documents after 2,000 tokens of instruction and query, with `max_tokens` 1
and `logprobs`, on a CPU through the server:

    list                          one request with all prompts, whose start is new
    one by one                    a request for each, whose start is new: the first one caches it
    one by one, after the list    the prompts of the list again: all find its start
    one by one, without cache     the same prompts on a server with TIERCEL_PREFIX_CACHE=0
    one prompt as long            as many tokens as the list must compute: the floor

Required: the list takes an eighth of the time of one by one without cache. The answers to the same
prompts are compared. In float32 (`--dtype`) a list runs as packed items, in 16 bits as prompts that
share the prefix through the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment
from benchmarks.e2e_first_request import model_id, run_server
from benchmarks.figures import save
from tiercel.loader.hub import resolve

SAME_PROMPTS = ("one by one, after the list", "one by one, without cache")
NUM_IDS = 10_000  # of the vocabulary, to choose from
TOP_LOGPROBS = 5


@dataclass(frozen=True)
class Run:
    """All prompts once."""

    seconds: float
    answers: list[dict[str, Any]]


@dataclass
class Way:
    """Times of the repeats of one way; tokens and answers are those of the last repeat."""

    seconds: list[float] = field(default_factory=list)
    computed: int = 0
    choices: list[dict[str, Any]] = field(default_factory=list)

    def add(self, run: Run) -> None:
        """Record a repeat."""
        self.seconds.append(run.seconds)
        self.choices = [choice for answer in run.answers for choice in answer["choices"]]
        usages = [answer["usage"] for answer in run.answers]
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        self.computed = sum(usage["prompt_tokens"] for usage in usages) - cached


def make_prompts(seed: int, arguments: argparse.Namespace) -> list[list[int]]:
    """Prompts with a random prefix and random ends."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, NUM_IDS) for _ in range(count)]

    start = tokens(arguments.shared)
    return [[*start, *tokens(arguments.own)] for _ in range(arguments.prompts)]


def complete(address: str, name: str, prompt: list[int] | list[list[int]]) -> dict[str, Any]:
    """The answer to one request."""
    body = {
        "model": name,
        "prompt": prompt,
        "max_tokens": 1,
        "logprobs": TOP_LOGPROBS,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=3600) as answer:
        result: dict[str, Any] = json.load(answer)
        return result


def ask_list(address: str, prompts: list[list[int]]) -> Run:
    """One request with all prompts."""
    name = model_id(address)
    began = time.perf_counter()
    answer = complete(address, name, prompts)
    return Run(time.perf_counter() - began, [answer])


def ask_each(address: str, prompts: list[list[int]]) -> Run:
    """A request for each prompt, one after another."""
    name = model_id(address)
    began = time.perf_counter()
    answers = [complete(address, name, prompt) for prompt in prompts]
    return Run(time.perf_counter() - began, answers)


def largest_difference(
    choices: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> tuple[int, float]:
    """Number of answers with another token, and the largest difference of a log-probability."""
    num_other, largest = 0, 0.0
    for choice, wanted in zip(choices, expected, strict=True):
        num_other += choice["text"] != wanted["text"]
        top, wanted_top = (c["logprobs"]["top_logprobs"][0] for c in (choice, wanted))
        shared = top.keys() & wanted_top.keys()
        largest = max([largest, *(abs(top[token] - wanted_top[token]) for token in shared)])
    return num_other, largest


def measure(model: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way."""
    ways: dict[str, Way] = defaultdict(Way)
    with run_server(model, "cpu") as (address, _):
        for repeat in range(arguments.repeats):
            prompts, others, whole = (make_prompts(3 * repeat + i, arguments) for i in range(3))
            ways["list"].add(ask_list(address, prompts))
            ways["one by one"].add(ask_each(address, others))
            ways["one by one, after the list"].add(ask_each(address, prompts))
            num_needed = arguments.shared + arguments.prompts * arguments.own
            long = [whole[0][i % len(whole[0])] for i in range(num_needed)]
            ways["one prompt as long"].add(ask_each(address, [long]))
    os.environ["TIERCEL_PREFIX_CACHE"] = "0"
    with run_server(model, "cpu") as (address, _):
        ways["one by one, without cache"].add(ask_each(address, prompts))
    rows = []
    for name, way in ways.items():
        row: dict[str, Any] = {
            "name": name,
            "model": model.name,
            "dtype": arguments.dtype,
            "prompts": arguments.prompts,
            "shared_tokens": arguments.shared,
            "own_tokens": arguments.own,
            "computed_tokens": way.computed,
            "seconds": way.seconds,
            "time_over_list": min(way.seconds) / min(ways["list"].seconds),
        }
        if name in SAME_PROMPTS:
            num_other, difference = largest_difference(way.choices, ways["list"].choices)
            row |= {"other_tokens": num_other, "largest_error_logprob": difference}
        rows.append(row)
    return rows


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="left out: the default model")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--shared", type=int, default=2000, help="tokens of the start")
    parser.add_argument("--own", type=int, default=16, help="tokens after it")
    parser.add_argument("--dtype", default="auto", help="of activations, as `serve` takes it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    os.environ["TIERCEL_DTYPE"] = arguments.dtype
    head = environment(torch.device("cpu"))
    rows = measure(resolve(arguments.model, offline=False, report=None), arguments)
    for row in rows:
        text = f"{row['name']}: {row['computed_tokens']} tokens, {min(row['seconds']):.2f} s, "
        text += f"{row['time_over_list']:.2f} times the list"
        if "largest_error_logprob" in row:
            text += f", log-probabilities within {row['largest_error_logprob']:.1e}"
        print(text)
    save(arguments.out, head, rows)


if __name__ == "__main__":
    run()
