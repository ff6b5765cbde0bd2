"""Seconds from a file in the page cache to the first token, and which stage takes them.

    python -m benchmarks.synthetic_model qwen3-8b qwen3-8b.gguf
    python -m benchmarks.e2e_load qwen3-8b.gguf --out benchmarks/results/e2e_load_h200.json

The file is read once before, so that the page cache holds it; loading reads it through a memory
map. Each load is a process of its own: the first compiles what the disk caches lack and is reported
apart. Two more find everything compiled. The last is cut into stages: the device is waited for at
the border of each, so its sum is larger than an undisturbed load; a stage within another counts for
itself alone. Clocks start before Python does.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment, save
from tiercel import LLM, SamplingParams

MAX_MODEL_LEN = 8192
NEEDED_S = 10.0
# What counts as which stage: module, what in it, name.
STAGES = (
    ("tiercel.engine.build", "find_source", "map and check the file"),
    ("tiercel.models.source", "ModelSource.tokenizer", "tokenizer"),
    ("tiercel.models.registry", "model_class", "import of the model"),
    ("tiercel.engine.engine", "WeightReader.file_tensor", "views of the file"),
    ("tiercel.engine.engine", "WeightReader.stored", "embedding table"),
    ("tiercel.quant", "QuantTensor.to", "copy to the device"),
    ("tiercel.ops.q4k_matvec", "q4k_repack", "repack"),
    ("tiercel.kernels.q4k_matvec", "load_q4k_matvec", "load kernels"),
    ("tiercel.ops.linear", "dequantize", "dense copies"),
    ("tiercel.models.decoder", "prepare_linear", "rest of the weights"),
    ("tiercel.engine.runner", "ModelRunner.measure_steps", "measure memory"),
    ("tiercel.engine.graphs", "DecodeSteps.capture", "capture"),
    ("tiercel.engine.build", "warm_up", "warm-up"),
    ("tiercel.engine.build", "build_engine", "rest of the engine"),
)


class Stages:
    """Seconds by stage; within a stage another counts for itself alone."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = time.perf_counter()
        self._wait = wait

    def _turn(self) -> None:
        self._wait()
        now = time.perf_counter()
        self.seconds[self._open[-1] if self._open else "everything else"] += now - self._since
        self._since = now

    def watch(self, owner: Any, name: str, stage: str) -> None:
        """Count calls of `owner.name` as `stage`."""
        inner = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            self._turn()
            self._open.append(stage)
            try:
                return inner(*args, **options)
            finally:
                self._turn()
                self._open.pop()

        setattr(owner, name, timed)

    def close(self) -> dict[str, float]:
        """All stages, largest first."""
        self._turn()
        return dict(sorted(self.seconds.items(), key=lambda item: -item[1]))


def load_once(model: Path, began: float, *, has_stages: bool) -> dict[str, Any]:
    """In a process of its own: load, and generate one token."""
    torch.cuda.synchronize()
    imported = time.time()
    stages = Stages(torch.cuda.synchronize)
    for module, path, stage in STAGES if has_stages else ():
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        stages.watch(owner, name, stage)
    with LLM(model, max_model_len=MAX_MODEL_LEN) as llm:
        loaded = time.time()
        llm.generate(
            ["Once upon a time"], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        )
        first = time.time()
    report: dict[str, Any] = {
        "import_s": imported - began,
        "load_s": loaded - imported,
        "first_token_s": first - loaded,
        "total_s": first - began,
    }
    if has_stages:
        report["stages_s"] = stages.close()
    return report


def run_child(model: Path, *, has_stages: bool) -> dict[str, Any]:
    """`load_once` in a new process."""
    command = [sys.executable, "-m", "benchmarks.e2e_load", str(model)]
    command += ["--began", str(time.time()), "--stages" if has_stages else "--plain"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    report: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return report


def read_through(path: Path) -> float:
    """Put the file into the page cache; seconds that took."""
    began = time.perf_counter()
    buffer = bytearray(64 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - began


def main() -> None:
    """Load one model several times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--stages", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.began is not None:
        print(json.dumps(load_once(options.model, options.began, has_stages=options.stages)))
        return
    read_s = read_through(options.model)
    report: dict[str, Any] = environment(torch.device("cuda"))
    report |= {
        "model": options.model.name,
        "bytes": options.model.stat().st_size,
        "read_file_s": read_s,
        "needed_s": NEEDED_S,
    }
    for name, has_stages in (("first", False), ("warm", False), ("in stages", True)):
        report[name] = run_child(options.model, has_stages=has_stages)
        print(name, json.dumps(report[name], indent=1), flush=True)
    save(options.out, report)


if __name__ == "__main__":
    main()
