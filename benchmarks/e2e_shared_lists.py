"""A list of prompts that share a start, one answer token each: one request against one by one.

    python -m benchmarks.e2e_shared_lists --out benchmarks/results/e2e_shared_lists.json

A reranker asks about 64 documents after 2,000 tokens of instruction and query, with `max_tokens` 1
and `logprobs`, on a CPU through the server. Three ways, each with a start of its own, which no
request has had before:

    list                        one request with all prompts
    one by one                  a request for each; the prefix cache has the start after the first
    one by one, without cache   the same on a server with TIERCEL_PREFIX_CACHE=0

The list's prompts are those of the last way, and the answers are compared. Needed: the list takes
an eighth of the time of one by one without cache. The floor of the list is the time of a prompt
with as many tokens as the list must compute. In float32 (`--dtype`) a list runs as packed items, in
16 bits as prompts that share the start by the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment
from benchmarks.e2e_first_request import model_id, run_server
from benchmarks.figures import save
from tiercel.loader.hub import resolve

NUM_IDS = 10_000  # of the vocabulary, to choose from
TOP_LOGPROBS = 5


def make_prompts(seed: int, arguments: argparse.Namespace) -> list[list[int]]:
    """Prompts with a random start and random rests."""
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


def ask_list(address: str, prompts: list[list[int]]) -> tuple[float, list[dict[str, Any]], int]:
    """Seconds of one request with all prompts, its choices, its cached tokens."""
    name = model_id(address)
    began = time.perf_counter()
    answer = complete(address, name, prompts)
    seconds = time.perf_counter() - began
    return seconds, answer["choices"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask_each(address: str, prompts: list[list[int]]) -> tuple[float, list[dict[str, Any]], int]:
    """The same of a request for each prompt, one after another."""
    name = model_id(address)
    choices, cached = [], 0
    began = time.perf_counter()
    for prompt in prompts:
        answer = complete(address, name, prompt)
        choices += answer["choices"]
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return time.perf_counter() - began, choices, cached


def largest_difference(
    choices: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> tuple[int, float]:
    """Answers with another token, and the largest difference of a log-probability."""
    num_other, largest = 0, 0.0
    for choice, wanted in zip(choices, expected, strict=True):
        num_other += choice["text"] != wanted["text"]
        top, wanted_top = (c["logprobs"]["top_logprobs"][0] for c in (choice, wanted))
        shared = top.keys() & wanted_top.keys()
        largest = max([largest, *(abs(top[token] - wanted_top[token]) for token in shared)])
    return num_other, largest


def measure(model: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way."""
    num_tokens = arguments.prompts * (arguments.shared + arguments.own)
    num_needed = arguments.shared + arguments.prompts * arguments.own
    samples: dict[str, list[float]] = {"list": [], "one by one": [], "one prompt as long": []}
    cached: dict[str, int] = {"one prompt as long": 0}
    with run_server(model, "cpu") as (address, _):
        for repeat in range(arguments.repeats):
            prompts = make_prompts(3 * repeat, arguments)
            seconds, choices, cached["list"] = ask_list(address, prompts)
            samples["list"].append(seconds)
            others = make_prompts(3 * repeat + 1, arguments)
            seconds, _, cached["one by one"] = ask_each(address, others)
            samples["one by one"].append(seconds)
            whole = make_prompts(3 * repeat + 2, arguments)[0]
            long = [whole[i % len(whole)] for i in range(num_needed)]
            samples["one prompt as long"].append(ask_each(address, [long])[0])
    os.environ["TIERCEL_PREFIX_CACHE"] = "0"
    with run_server(model, "cpu") as (address, _):
        seconds, expected, cached["one by one, without cache"] = ask_each(address, prompts)
    samples["one by one, without cache"] = [seconds]
    num_other, difference = largest_difference(choices, expected)
    best = {name: min(times) for name, times in samples.items()}
    return [
        {
            "name": name,
            "model": model.name,
            "dtype": arguments.dtype,
            "prompts": arguments.prompts,
            "shared_tokens": arguments.shared,
            "own_tokens": arguments.own,
            "computed_tokens": (num_needed if name == "one prompt as long" else num_tokens)
            - cached[name],
            "seconds": times,
            "time_over_list": best[name] / best["list"],
            "answers_with_another_token": num_other,
            "largest_error_logprob": difference,
        }
        for name, times in samples.items()
    ]


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
        seconds = min(row["seconds"])
        print(f"{row['name']}: {seconds:.2f} s, {row['time_over_list']:.2f} times the list")
    print(f"largest difference of a log-probability: {rows[0]['largest_error_logprob']:.1e}")
    save(arguments.out, head, rows)


if __name__ == "__main__":
    run()
