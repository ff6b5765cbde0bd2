"""Seconds from a file in the page cache to the first token, by stage.

    python -m benchmarks.synthetic_model qwen3-8b qwen3-8b.gguf
    python -m benchmarks.e2e_load qwen3-8b.gguf --out benchmarks/results/e2e_load_h200.json
    python -m benchmarks.e2e_load smollm2.gguf --command --repeats 9 --out cpu_start.json

The file is read once before, so that it is in the page cache; loading reads it through a memory
map. Each load runs in a separate process, timed from before Python starts. With `--cold` an
additional first load compiles what is missing in the caches of kernels and of Python's bytecode;
the other loads should find everything compiled. The last load is cut into stages: the host waits
for the device at the border of each stage, and imports are timed one by one, so its sum is larger
than an undisturbed load; time in a nested stage counts for the nested stage only.

With `--command` the command `tiercel generate` runs on a CPU, from its start to the first byte of
its answer and to its end. Nothing is imported or measured within it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment
from benchmarks.figures import save
from tiercel import LLM, SamplingParams

MAX_MODEL_LEN = 8192
NEEDED_S = 10.0
NUM_PACKAGES = 8  # whose imports are listed
# Stage by function: module, name in it, stage.
STAGES = (
    ("tiercel.engine.load", "find_source", "map and check the file"),
    ("tiercel.models.source", "ModelSource.tokenizer", "tokenizer"),
    ("tiercel.engine.load", "model_class", "import of the model"),
    ("tiercel.engine.build", "WeightReader.file_tensor", "views of the file"),
    ("tiercel.engine.build", "WeightReader.stored", "embedding table"),
    ("tiercel.models.upload", "Uploader.__call__", "copy to the device"),
    ("tiercel.ops.packed_matvec", "packed_repack", "repack"),
    ("tiercel.kernels.packed.packed_matvec", "load_packed_matvec", "load kernels"),
    ("tiercel.ops.linear", "dequantize", "dense copies"),
    ("tiercel.models.decoder_build", "prepare_linear", "rest of the weights"),
    ("tiercel.models.decoder_build", "DecoderBuilder.fused_step", "weights of the step's kernel"),
    ("tiercel.kernels.runtime.triton_launch", "TritonLaunch._compile", "load Triton kernels"),
    ("tiercel.runner.runner", "ModelRunner.measure_steps", "measure memory"),
    ("tiercel.runner.prompt_graphs", "PromptSteps.capture", "graphs of prompts"),
    ("tiercel.runner.decode_graphs", "DecodeSteps.capture", "graphs of answers"),
    ("tiercel.engine.load", "warm_up", "warm-up"),
    ("tiercel.engine.load", "build_engine", "rest of the engine"),
    ("tiercel.llm", "LLM.generate", "first token"),
)


class Stages:
    """Seconds by stage; time in a nested stage counts for the nested stage only."""

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
    """Load in a separate process, and generate one token."""
    imported = time.time()
    torch.cuda.synchronize()
    started = time.time()
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
        "python_and_imports_s": imported - began,
        "cuda_start_s": started - imported,
        "load_s": loaded - started,
        "first_token_s": first - loaded,
        "total_s": first - began,
    }
    if has_stages:
        report["stages_s"] = stages.close()
    return report


def run_command(model: Path) -> dict[str, float]:
    """Seconds of one `tiercel generate` on a CPU: to the first byte of its answer, and in all."""
    # Bytecode is written like in any installation, whatever this environment says.
    hidden = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, "-m", "tiercel", "generate", "Hello", "--model", str(model)]
    command += ["--device", "cpu", "--max-tokens", "1", "--temperature", "0"]
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables
    ) as process:
        assert process.stdout is not None, "it is a pipe"
        is_answered = bool(process.stdout.read(1))
        first_s = time.perf_counter() - began
    if not is_answered or process.returncode:
        raise SystemExit(f"{' '.join(command)}: status {process.returncode}, or no answer")
    return {"first_token_s": first_s, "total_s": time.perf_counter() - began}


def measure_command(model: Path, repeats: int) -> list[dict[str, Any]]:
    """Rows of `repeats` commands, after one that fills the caches, with median and least."""
    run_command(model)
    runs = [run_command(model) for _ in range(repeats)]
    rows: list[dict[str, Any]] = [{"name": "command", **run} for run in runs]
    for name, pick in (("median", statistics.median), ("least", min)):
        rows.append({"name": f"command, {name}"} | {k: pick(r[k] for r in runs) for k in runs[0]})
    return rows


def run_child(model: Path, *, has_stages: bool) -> dict[str, Any]:
    """`load_once` in a new process."""
    command = [sys.executable, *(("-X", "importtime") if has_stages else ())]
    command += ["-m", "benchmarks.e2e_load", str(model)]
    command += ["--began", str(time.time()), "--stages" if has_stages else "--plain"]
    answer = subprocess.run(command, capture_output=True, check=False, text=True)
    if answer.returncode:
        raise SystemExit(f"a load failed:\n{answer.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    if has_stages:
        report["imports_s"] = import_seconds(answer.stderr)
    return report


def import_seconds(lines: str) -> dict[str, float]:
    """Seconds by package from the output of `-X importtime`, largest first."""
    seconds: dict[str, float] = defaultdict(float)
    for own, name in re.findall(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", lines, re.M):
        seconds[name.partition(".")[0]] += int(own) / 1e6
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return dict(ordered[:NUM_PACKAGES]) | {"others": sum(own for _, own in ordered[NUM_PACKAGES:])}


def read_through(path: Path) -> float:
    """Read the file into the page cache; returns the seconds."""
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
    parser.add_argument(
        "--cold", action="store_true", help="compile first, and report that load too"
    )
    parser.add_argument("--command", action="store_true", help="time `tiercel generate` on a CPU")
    parser.add_argument("--repeats", type=int, default=3, help="loads with everything compiled")
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--stages", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.began is not None:
        print(json.dumps(load_once(options.model, options.began, has_stages=options.stages)))
        return
    read_s = read_through(options.model)
    size = options.model.stat().st_size
    file = {"name": "file", "model": options.model.name, "bytes": size, "read_file_s": read_s}
    rows: list[dict[str, Any]] = [file | {"needed_s": NEEDED_S}]
    if options.command:
        rows += measure_command(options.model, options.repeats)
        print(*rows, sep="\n")
        save(options.out, environment(torch.device("cpu")), rows)
        return
    if options.cold:
        rows.append({"name": "cold", **run_child(options.model, has_stages=False)})
    warm = [run_child(options.model, has_stages=False) for _ in range(options.repeats)]
    rows += [{"name": "warm", **load} for load in warm]
    rows.append({"name": "warm, median", "total_s": statistics.median(x["total_s"] for x in warm)})
    load = run_child(options.model, has_stages=True)
    stages, imports = load.pop("stages_s"), load.pop("imports_s")
    rows.append({"name": "in stages", **load})
    rows += [{"name": f"stage: {name}", "s": seconds} for name, seconds in stages.items()]
    rows += [{"name": f"import of {name}", "s": seconds} for name, seconds in imports.items()]
    print(*rows, sep="\n")
    save(options.out, environment(torch.device("cuda")), rows)


if __name__ == "__main__":
    main()
