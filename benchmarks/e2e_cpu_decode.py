"""One request on a CPU compared with llama.cpp: decode and prompt speed of the same file.

    python -m benchmarks.e2e_cpu_decode --out benchmarks/results/e2e_cpu_decode.json

Each engine runs in a separate process, with its own threads, and both are measured in turn, so that
neither has a quieter machine. llama.cpp comes as the package cyllama, through its low-level
context: llama_decode of one token at a time and its greedy sampler, flash attention and weight
repacking by its defaults; `BUILDS` says for which instructions its wheel was compiled, which
matters for the figures. Its decode speed is the better of the wall clock and its own timer of
llama_decode alone, so that no cost of the binding counts against it; Tiercel's is the wall clock of
the public API, sampling and text included. Both get the same token ids and continue past the end
token. Another job on the same cores spoils the figures, llama.cpp's first: its threads spin.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.common import environment
from benchmarks.figures import save
from tiercel.bench.environment import installed_version
from tiercel.llm import LLM
from tiercel.loader.hub import resolve
from tiercel.params import SamplingParams

try:
    from cyllama.llama import llama_cpp
except ImportError:
    llama_cpp = None

MISSING = "cyllama is not installed: llama.cpp is left out. pip install cyllama==0.2.18 adds it."
TEXT = "The three most important things to know about the Moon are"
# Instructions in the wheels from PyPI, counted with objdump.
BUILDS = {"0.2.18": "portable x86-64 wheel: AVX2, no AVX-512 and no VNNI instructions"}
PAUSE_S = 0.5  # after a turn, until spinning threads of the other engine sleep


@dataclass(frozen=True)
class Settings:
    """Settings of both engines."""

    model: str
    threads: int
    new_tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class Turn:
    """Figures of one turn of one engine, tokens per second."""

    decode_tok_s: float
    prompt_tok_s: float
    token_ids: list[int] = field(repr=False)
    wall_decode_tok_s: float = 0.0


class Engine(Protocol):
    """One engine in its process."""

    def describe(self) -> dict[str, Any]:
        """Versions and options."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""

    def run(self, decode_prompt: list[int], long_prompt: list[int]) -> Turn:
        """Decode after the first prompt; read the second."""


class Tiercel:
    """The public API, greedy."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self.settings = settings
        self.llm = LLM(settings.model, device="cpu", max_model_len=context_length(settings))

    def describe(self) -> dict[str, Any]:
        dtype = str(self.llm.config.dtype)
        return {"dtype": dtype, "threads": torch.get_num_threads(), "torch": torch.__version__}

    def encode(self, text: str) -> list[int]:
        return self.llm.encode(text, add_special_tokens=True)

    def run(self, decode_prompt: list[int], long_prompt: list[int]) -> Turn:
        output, decode_s = self._generate(decode_prompt, self.settings.new_tokens)
        speed = (self.settings.new_tokens - 1) / decode_s
        _, first_s = self._generate(long_prompt, 1)
        return Turn(speed, len(long_prompt) / first_s, output, speed)

    def _generate(self, prompt: list[int], new_tokens: int) -> tuple[list[int], float]:
        """The answer, and the seconds from its first to its last token (for one token: to it)."""
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        (output,) = self.llm.generate({"prompt_token_ids": prompt}, params)
        metrics = output.metrics
        first_s = metrics.first_token_s or 0.0
        seconds = first_s if new_tokens == 1 else metrics.finished_s - first_s
        return output.outputs[0].token_ids, seconds


class LlamaCpp:
    """llama.cpp's context, one llama_decode per token."""

    def __init__(self, settings: Settings) -> None:
        lines: list[str] = []
        llama_cpp.set_log_callback(lambda _, text: lines.append(text.strip()))
        llama_cpp.llama_backend_init()
        llama_cpp.ggml_backend_load_all()
        self.settings = settings
        self.model = llama_cpp.LlamaModel(settings.model, llama_cpp.LlamaModelParams())
        self.params = llama_cpp.LlamaContextParams()
        self.params.n_ctx = context_length(settings)
        self.params.n_threads = self.params.n_threads_batch = settings.threads
        self.params.no_perf = False
        self.context = llama_cpp.LlamaContext(self.model, self.params)
        llama_cpp.disable_logging()  # also forgets the callback, which must not outlive Python
        self.flash_attention = next((line for line in lines if "Flash Attention" in line), "auto")
        self.sampler = llama_cpp.LlamaSampler(llama_cpp.LlamaSamplerChainParams())
        self.sampler.add_greedy()

    def describe(self) -> dict[str, Any]:
        config = Path(llama_cpp.__file__).parents[1] / "build_config.json"
        versions = json.loads(config.read_text())["versions"] if config.exists() else {}
        package = installed_version("cyllama")
        return {
            "cyllama": package,
            "build": BUILDS.get(package or "", "unknown"),
            "llama_cpp": versions.get("llama_cpp_version"),
            "ggml": llama_cpp.ggml_version(),
            "backends": llama_cpp.ggml_backend_reg_names(),
            "flash_attention": self.flash_attention,
            "threads": self.params.n_threads,
            "threads_batch": self.params.n_threads_batch,
            "n_batch": self.params.n_batch,
            "n_ubatch": self.params.n_ubatch,
            "api": "LlamaContext.decode of one token, LlamaSampler greedy",
        }

    def encode(self, text: str) -> list[int]:
        vocab = self.model.get_vocab()
        return vocab.tokenize(text, vocab.get_add_bos(), parse_special=True)

    def run(self, decode_prompt: list[int], long_prompt: list[int]) -> Turn:
        token_ids, _ = self._read(decode_prompt)
        self.context.reset_perf_data()
        start = time.perf_counter()
        for place in range(self.settings.new_tokens - 1):
            batch = llama_cpp.llama_batch_get_one(token_ids[-1:], len(decode_prompt) + place)
            self.context.decode(batch)
            token_ids.append(self.sampler.sample(self.context, -1))
        wall = (self.settings.new_tokens - 1) / (time.perf_counter() - start)
        perf = self.context.get_perf_data()
        own = 1000.0 * perf["n_eval"] / perf["t_eval_ms"] if perf["t_eval_ms"] else 0.0
        _, first_s = self._read(long_prompt)
        return Turn(max(wall, own), len(long_prompt) / first_s, token_ids, wall)

    def _read(self, prompt: list[int]) -> tuple[list[int], float]:
        """The token after a prompt in an empty cache, and the seconds until it was sampled."""
        self.context.kv_cache_clear(False)
        start = time.perf_counter()
        self.context.decode(llama_cpp.llama_batch_get_one(prompt))
        token_id = self.sampler.sample(self.context, -1)
        return [token_id], time.perf_counter() - start


def context_length(settings: Settings) -> int:
    """Room for both prompts and the answer, in whole blocks."""
    return -(-(settings.prompt_tokens + settings.new_tokens + 64) // 256) * 256


def _work(connection: Connection, make: Callable[[Settings], Engine], settings: Settings) -> None:
    """Answer (method, arguments) until None arrives."""
    engine = make(settings)
    while (task := connection.recv()) is not None:
        method, arguments = task
        connection.send(getattr(engine, method)(*arguments))


class Worker:
    """An engine in a separate process."""

    def __init__(self, make: Callable[[Settings], Engine], settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, make, settings), daemon=True)
        self.process.start()
        theirs.close()  # so that a dead child shows as the end of the pipe

    def ask(self, method: str, *arguments: object) -> Any:
        """Call a method of the engine and wait."""
        self.connection.send((method, arguments))
        return self.connection.recv()

    def close(self) -> None:
        self.connection.send(None)
        self.process.join(timeout=30)


def summary(turns: list[Turn]) -> dict[str, Any]:
    """Every figure; a file keeps median, minimum and maximum."""
    result: dict[str, Any] = {}
    for name in ("decode_tok_s", "wall_decode_tok_s", "prompt_tok_s"):
        every = [round(getattr(turn, name), 2) for turn in turns]
        result[name.replace("tok_s", "tokens_per_second")] = every
    return result


def equal_tokens(a: list[int], b: list[int]) -> int:
    """The number of leading tokens on which two answers agree."""
    pairs = zip(a, b, strict=True)
    return next((place for place, (x, y) in enumerate(pairs) if x != y), len(a))


def measure(settings: Settings, repetitions: int) -> list[dict[str, Any]]:
    """Run the engines in turn; the first turn of each only warms up.

    Returns:
        A row for each engine, and one row that compares them.
    """
    makers: dict[str, Callable[[Settings], Engine]] = {"tiercel": Tiercel}
    if llama_cpp is None:
        print(MISSING)
    else:
        makers["llama_cpp"] = LlamaCpp
    workers = {name: Worker(make, settings) for name, make in makers.items()}
    prompts = {name: worker.ask("encode", TEXT) for name, worker in workers.items()}
    short = prompts["tiercel"]
    turns: dict[str, list[Turn]] = {name: [] for name in workers}
    for repetition in range(-1, repetitions):
        # A new prompt each time, so that none is cached. Random(-1) is Random(1).
        generator = random.Random(1000 + repetition)
        long = [generator.randrange(100, 40000) for _ in range(settings.prompt_tokens)]
        for name, worker in workers.items():
            time.sleep(PAUSE_S)
            turn = worker.ask("run", short, long)
            if repetition >= 0:
                turns[name].append(turn)
                print(f"{name:<10}{turn.decode_tok_s:>9.1f} decode{turn.prompt_tok_s:>9.1f} prompt")
    rows: dict[str, dict[str, Any]] = {}
    for name, worker in workers.items():
        rows[name] = {"engine": name, "build": worker.ask("describe"), **summary(turns[name])}
        worker.close()
    both: dict[str, Any] = {"engine": "both"}
    both["prompt_ids_agree"] = all(ids == short for ids in prompts.values())
    if llama_cpp is None:
        return [*rows.values(), both]
    for what in ("decode", "prompt"):
        every = (rows[name][f"{what}_tokens_per_second"] for name in ("tiercel", "llama_cpp"))
        ours, theirs = map(statistics.median, every)
        both[f"{what}_ratio"] = round(ours / theirs, 3)
    answers = (turns[name][-1].token_ids for name in ("tiercel", "llama_cpp"))
    both["equal_leading_tokens"] = equal_tokens(*answers)
    return [*rows.values(), both]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a .gguf file; the default model without it")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--threads", type=int, default=2, help="of each engine")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    path = resolve(arguments.model, offline=False, report=None)
    sizes = (arguments.threads, arguments.new_tokens, arguments.prompt_tokens)
    settings = Settings(str(path), *sizes)
    rows = measure(settings, arguments.repetitions)
    asked = asdict(settings) | {"model": path.name, "model_bytes": path.stat().st_size}
    for what in ("decode", "prompt"):
        if f"{what}_ratio" in rows[-1]:
            print(f"{what}: {rows[-1][f'{what}_ratio']:.2f} times llama.cpp")
    save(arguments.out, environment(torch.device("cpu")), [asked | row for row in rows])


if __name__ == "__main__":
    main()
