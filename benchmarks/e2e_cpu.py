r"""Tiercel on a CPU compared with llama.cpp: the same files and token ids, in alternating turns.

    python -m benchmarks.e2e_cpu --out benchmarks/results/e2e_cpu.json
    python -m benchmarks.e2e_cpu --jobs decode --models smollm2 --threads 2 --turns 3

Jobs:

    decode     one request
    prompt     a prompt of 512 tokens, until the token after it
    batch      8 requests together, compared with one
    drafts     one request that asks for an edited file, with n-gram drafts and without them
    bandwidth  the share of the memory's read bandwidth that decoding reaches
    busy       one request beside two busy loops, compared with an idle machine

llama.cpp is best built for this processor, in an environment of its own; `--peer` names the
interpreter of another one, also of the package cyllama (benchmarks/e2e_cpu_llama.py):

    python -m venv .venv-llama
    CMAKE_ARGS=-DGGML_NATIVE=ON .venv-llama/bin/pip install --no-binary llama-cpp-python \
        llama-cpp-python==0.3.36

`--llama-bench` names a program of that name (benchmarks/e2e_cpu_llama_bench.py): one file without
dependencies, for a machine that has no compiler. It reports the rates of decode, prompt, bandwidth
and busy. From llama.cpp's sources, here for AVX-512:

    cmake -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_STATIC=ON \
        -DCMAKE_EXE_LINKER_FLAGS=-static -DLLAMA_OPENSSL=OFF -DGGML_NATIVE=OFF -DGGML_AVX2=ON \
        -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON \
        -DGGML_AVX512_BF16=ON -DGGML_AVX512_VBMI=ON
    cmake --build build --target llama-bench

Each engine runs in a process of its own, with its own threads, and all are measured in turn, so
that none has a quieter machine. Another job on the same cores spoils the figures, llama.cpp's
first: its threads spin. Models other than SmolLM2 have the shapes and types of published files and
random weights (benchmarks/synthetic_model.py); they are written on the first use. What random
weights answer says nothing about drafts: those are measured with SmolLM2 and files given by path.

The bandwidth is that of PyTorch's sum over 1 GiB of float32, by as many threads, the best of all
turns. A decode step reads all weights, of the embedding only where it is the output matrix too.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment
from benchmarks.e2e_cpu_pipe import ROOT, EngineError, Worker
from benchmarks.figures import save
from benchmarks.spec_texts import EDIT_PROMPT
from tiercel.loader.gguf import read_gguf
from tiercel.loader.hub import resolve

JOBS = ("decode", "prompt", "batch", "drafts", "bandwidth", "busy")
MODELS = ("smollm2", "qwen2.5-0.5b", "gemma3-270m", "qwen2.5-1.5b")
PEERS = (".venv-llama/bin/python", ".venv-cyllama/bin/python")
# The rate that each job is compared with, of the same engine and turn.
BASES = {
    "batch": "single_tokens_per_second",
    "drafts": "plain_tokens_per_second",
    "busy": "idle_tokens_per_second",
}
TEXT = "The three most important things to know about the Moon are"
X86_INSTRUCTIONS = ("avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "amx_int8")
INSTRUCTIONS = (*X86_INSTRUCTIONS, "asimddp", "i8mm", "sve")
BUSY_LOOP = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"
PAUSE_S = 0.5  # before each measurement, until spinning threads of another engine sleep
BANDWIDTH_BYTES = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """Tokens of the jobs, and the number of processes that keep the cores busy."""

    new_tokens: int = 128
    prompt_tokens: int = 512
    requests: int = 8
    batch_tokens: int = 64
    busy_tokens: int = 48
    edit_tokens: int = 160
    busy_loops: int = 2
    bandwidth_bytes: int = BANDWIDTH_BYTES

    def context(self, edit_prompt_tokens: int) -> int:
        """Tokens of the longest request, in whole blocks."""
        longest = max(
            self.prompt_tokens + 1,
            edit_prompt_tokens + self.edit_tokens,
            64 + max(self.new_tokens, self.batch_tokens, self.busy_tokens),
        )
        return -(-longest // 256) * 256


@dataclass(frozen=True)
class Case:
    """A model file, with a number of threads."""

    model: str
    path: Path
    threads: int
    can_draft: bool

    @property
    def row(self) -> dict[str, Any]:
        """The fields that all rows of this case share."""
        return {"model": self.path.name, "threads": self.threads}


@dataclass
class Turn:
    """Token ids of one turn."""

    short: list[int]
    long: list[int]
    several: list[list[int]]
    edit: list[int] = field(default_factory=list)


Job = Callable[[Worker, Turn, Sizes], dict[str, Any] | None]


def measure_decode(worker: Worker, turn: Turn, sizes: Sizes) -> dict[str, Any]:
    """One request."""
    time.sleep(PAUSE_S)
    return dict(worker.ask("decode", prompt=turn.short, new_tokens=sizes.new_tokens))


def measure_prompt(worker: Worker, turn: Turn, _: Sizes) -> dict[str, Any]:
    """A long prompt."""
    time.sleep(PAUSE_S)
    return dict(worker.ask("read", prompt=turn.long))


def measure_batch(worker: Worker, turn: Turn, sizes: Sizes) -> dict[str, Any] | None:
    """Several requests together, and one."""
    time.sleep(PAUSE_S)
    several = worker.ask("batch", prompts=turn.several, new_tokens=sizes.batch_tokens)
    if several is None:
        return None
    single = worker.ask("decode", prompt=turn.several[0], new_tokens=sizes.batch_tokens)
    return dict(several) | {BASES["batch"]: single["tokens_per_second"]}


def measure_drafts(worker: Worker, turn: Turn, sizes: Sizes) -> dict[str, Any]:
    """An edited file."""
    time.sleep(PAUSE_S)
    return dict(worker.ask("drafts", prompt=turn.edit, new_tokens=sizes.edit_tokens))


def measure_busy(worker: Worker, turn: Turn, sizes: Sizes) -> dict[str, Any]:
    """One request on an idle machine, then beside busy loops."""
    time.sleep(PAUSE_S)
    idle = worker.ask("decode", prompt=turn.short, new_tokens=sizes.busy_tokens)
    with busy_loops(sizes.busy_loops):
        busy = worker.ask("decode", prompt=turn.short, new_tokens=sizes.busy_tokens)
    return dict(busy) | {BASES["busy"]: idle["tokens_per_second"]}


MEASURES: dict[str, Job] = {
    "decode": measure_decode,
    "prompt": measure_prompt,
    "batch": measure_batch,
    "drafts": measure_drafts,
    "busy": measure_busy,
}


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that each take a core; they end by themselves if this one is killed."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(count)]
    try:
        time.sleep(PAUSE_S)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def read_gbps(buffer: torch.Tensor, threads: int) -> float:
    """Read bandwidth of one sum over a buffer, the best of three."""
    torch.set_num_threads(threads)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        buffer.sum()
        times.append(time.perf_counter() - start)
    return buffer.nbytes / min(times) / 1e9


def step_bytes(path: Path) -> int:
    """Bytes of weights that a decode step reads."""
    tensors = read_gguf(path).tensors
    unread = "token_embd.weight" if "output.weight" in tensors else ""
    return sum(info.nbytes for name, info in tensors.items() if name != unread)


def start_workers(
    commands: Mapping[str, Sequence[str]], case: Case, sizes: Sizes, jobs: Sequence[str]
) -> tuple[dict[str, Worker], dict[str, dict[str, Any]]]:
    """The processes of a case by engine, and their descriptions. Peers that fail are left out.

    The engine "drafts" is Tiercel with n-gram drafts.
    """
    settings: dict[str, Any] = {"model": str(case.path), "threads": case.threads, "spec": "off"}
    settings |= {"context": sizes.context(0), "requests": sizes.requests}
    workers = {name: Worker(command, settings) for name, command in commands.items()}
    if "drafts" in jobs and case.can_draft:
        settings |= {"spec": "ngram", "context": sizes.context(512)}
        workers["drafts"] = Worker(commands["tiercel"], settings)
    about = {}
    for name in list(workers):
        try:
            about[name] = workers[name].ask("describe")
        except EngineError as error:
            workers.pop(name).close()
            if name in ("tiercel", "drafts"):
                raise
            print(f"{name} is left out: {error}", flush=True)
    return workers, about


def make_turn(number: int, sizes: Sizes, vocab_size: int, short: list[int]) -> Turn:
    """New prompts, so that none is cached. Ids below 100 may be special."""
    draw = random.Random(f"turn {number}")
    low, high = min(100, vocab_size // 4), min(40_000, vocab_size - 8)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(low, high) for _ in range(length)]

    several = [prompt(16) for _ in range(sizes.requests)]
    return Turn(short, prompt(sizes.prompt_tokens), several)


def measure(
    case: Case,
    commands: Mapping[str, Sequence[str]],
    jobs: Sequence[str],
    turns: int,
    sizes: Sizes,
) -> list[dict[str, Any]]:
    """Run the engines in turn; the first turn of each only warms up.

    Args:
        case: what to run.
        commands: the program of each engine; Tiercel's is called "tiercel".
        jobs: some of `JOBS`.
        turns: of each engine.
        sizes: of the jobs.

    Returns:
        A row for each job and engine, and one for each comparison.
    """
    workers, about = start_workers(commands, case, sizes, jobs)
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    gbps: list[float] = []
    buffer = torch.ones(sizes.bandwidth_bytes // 4 if "bandwidth" in jobs else 1)
    try:
        short = workers["tiercel"].ask("encode", text=TEXT)
        for number in range(-1, turns):
            turn = make_turn(number, sizes, about["tiercel"]["vocab_size"], short)
            if "drafts" in workers:
                turn.edit = workers["drafts"].ask("encode_chat", text=EDIT_PROMPT)
            if "bandwidth" in jobs and number >= 0:
                time.sleep(PAUSE_S)
                gbps.append(read_gbps(buffer, case.threads))
            for job, name in selected(jobs, workers):
                result = MEASURES[job](workers[name], turn, sizes)
                if result is not None:
                    shown = name if name == "drafts" else about[name]["engine"]
                    print(progress(case, number, job, shown, result), flush=True)
                    if number >= 0:
                        found.setdefault((job, name), []).append(result)
    finally:
        for worker in workers.values():
            worker.close()
    rows = [
        case.row | {"job": job} | engine_fields(about[name]) | summary(job, results)
        for (job, name), results in found.items()
    ]
    if gbps:
        rows += bandwidth_rows(case, max(gbps), rows)
    return rows + comparisons(case, found, about)


def selected(jobs: Sequence[str], workers: Mapping[str, Worker]) -> Iterator[tuple[str, str]]:
    """The jobs and engines of a turn, in order."""
    for job in jobs:
        if job == "bandwidth":
            continue
        if job == "drafts":
            yield from ((job, name) for name in workers if name == "drafts")
        else:
            yield from ((job, name) for name in workers if name != "drafts")


def progress(case: Case, number: int, job: str, name: str, result: Mapping[str, Any]) -> str:
    """One line about one measurement."""
    base = f" ({result[BASES[job]]:.1f} alone)" if job in BASES else ""
    rate = f"{result['tokens_per_second']:>9.1f} tokens/s{base}"
    turn = f"turn {number}" if number >= 0 else "warm-up"
    return f"{case.model} {case.threads} threads, {turn}: {job:<8}{name:<10}{rate}"


def engine_fields(about: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's name and build."""
    build = {name: about[name] for name in about if name not in ("engine", "vocab_size")}
    return {"engine": about["engine"], "build": build}


def summary(job: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every figure of an engine's turns; a file keeps median, minimum and maximum."""
    row: dict[str, Any] = {}
    for name in results[0]:
        if name != "token_ids":
            row[name] = [rounded(result[name]) for result in results]
    if job in BASES:
        ours, base = (statistics.median(row[n]) for n in ("tokens_per_second", BASES[job]))
        row["ratio"] = rounded(ours / base)
    return row


def bandwidth_rows(
    case: Case, gbps: float, rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The bandwidth, and the share of it that each engine's decoding reaches."""
    size = step_bytes(case.path)
    shared = case.row | {"job": "bandwidth", "read_gbps": rounded(gbps), "step_bytes": size}
    return [
        shared
        | {
            "engine": row["engine"],
            "ratio": rounded(statistics.median(row["tokens_per_second"]) * size / gbps / 1e9),
        }
        for row in rows
        if row["job"] == "decode"
    ]


def comparisons(
    case: Case,
    found: Mapping[tuple[str, str], list[dict[str, Any]]],
    about: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """The ratio of each job's median to each peer's; of answers also the equal first tokens."""
    rows = []
    for (job, name), theirs in found.items():
        ours = found.get((job, "tiercel"))
        if ours is None or name == "tiercel":
            continue
        medians = (statistics.median(x["tokens_per_second"] for x in r) for r in (ours, theirs))
        row = case.row | {"job": job, "engine": f"tiercel / {about[name]['engine']}"}
        row["ratio"] = rounded(next(medians) / next(medians))
        if "token_ids" in theirs[-1]:
            answers = (ours[-1]["token_ids"], theirs[-1]["token_ids"])
            row["equal_leading_tokens"] = equal_tokens(*answers)
        rows.append(row)
    return rows


def rounded(value: float) -> float:
    """Four significant digits: more is noise."""
    return float(f"{value:.4g}")


def equal_tokens(a: list[int], b: list[int]) -> int:
    """The number of leading tokens on which two answers agree."""
    pairs = zip(a, b, strict=True)
    return next((place for place, (x, y) in enumerate(pairs) if x != y), len(a))


def find_model(name: str, folder: Path) -> Case:
    """The file of a model, which is written if it is a synthetic one."""
    if name == "smollm2" or name.endswith(".gguf"):
        return Case(name, Path(resolve(name, offline=False, report=None)).resolve(), 0, True)
    from benchmarks import synthetic_model  # noqa: PLC0415 - needs the package gguf

    path = folder / f"{name}.gguf"
    if not path.exists():
        print(f"writing {path}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        synthetic_model.write(name, part)
        part.rename(path)
    return Case(name, path.resolve(), 0, False)


def find_engines(peers: Sequence[str] | None, programs: Sequence[str]) -> dict[str, list[str]]:
    """The commands of Tiercel and of those peers that exist.

    Args:
        peers: interpreters; None for those of `PEERS`, or none beside programs.
        programs: paths of llama-bench.
    """
    module = ["-m", "benchmarks.e2e_cpu_tiercel"]
    commands = {"tiercel": [sys.executable, *module]}
    interpreters = (() if programs else PEERS) if peers is None else peers
    for peer in (*interpreters, *programs):
        path = str(ROOT / peer)
        if not Path(path).exists():
            print(f"{peer} is missing: a peer is left out (python -m benchmarks.e2e_cpu --help).")
        elif peer in programs:
            commands[peer] = [sys.executable, "-m", "benchmarks.e2e_cpu_llama_bench", path]
        else:
            commands[peer] = [path, "-m", "benchmarks.e2e_cpu_llama"]
    return commands


def machine() -> dict[str, Any]:
    """The head of the file: with the processor's instructions, and those chosen for Tiercel."""
    head = environment(torch.device("cpu"))
    del head["hardware"]["threads"]  # each row has its own
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    head["hardware"]["instructions"] = " ".join(i for i in INSTRUCTIONS if i in words) or "not read"
    head["hardware"]["tiercel_cpu"] = os.environ.get("TIERCEL_CPU", "not forced")
    return head


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the ratios."""
    for row in rows:
        if "ratio" in row:
            what = f"{row['job']:<10}{row['model']}, {row['threads']} threads, {row['engine']}"
            print(f"{what:<90}{row['ratio']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS)
    parser.add_argument(
        "--models", nargs="+", default=MODELS, help="names, or paths of .gguf files"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of each engine")
    parser.add_argument("--turns", type=int, default=13)
    parser.add_argument("--new-tokens", type=int, default=Sizes.new_tokens, help="job decode")
    parser.add_argument("--prompt-tokens", type=int, default=Sizes.prompt_tokens, help="job prompt")
    parser.add_argument("--requests", type=int, default=Sizes.requests, help="job batch")
    parser.add_argument(
        "--peer",
        action="append",
        help="Python with llama-cpp-python or cyllama; without it those of .venv-*",
    )
    parser.add_argument(
        "--llama-bench",
        action="append",
        default=[],
        help="path of llama.cpp's program of that name",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "tiercel-models",
        help="of synthetic models",
    )
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    sizes = Sizes(
        new_tokens=options.new_tokens,
        prompt_tokens=options.prompt_tokens,
        requests=options.requests,
    )
    commands, head = find_engines(options.peer, options.llama_bench), machine()
    rows: list[dict[str, Any]] = []
    for name in options.models:
        found = find_model(name, options.folder)
        if "drafts" in options.jobs and not found.can_draft:
            print(f"{name} has random weights: drafts are left out.", flush=True)
        for threads in options.threads:
            case = Case(found.model, found.path, threads, found.can_draft)
            new = measure(case, commands, options.jobs, options.turns, sizes)
            show(new)
            rows += new
            save(options.out, head, rows)  # finished rows are kept if a later case fails


if __name__ == "__main__":
    main()
