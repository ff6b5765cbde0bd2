"""Runs GPU tests under compute-sanitizer and names the kernels with errors.

    python -m benchmarks.sanitize                         all ops, a small model's steps, engines
    python -m benchmarks.sanitize wide narrow --jobs 2    small models through the whole engine
    python -m benchmarks.sanitize ngram_match verify_accept --tool racecheck --jobs 4
    python -m benchmarks.sanitize ngram_index --kernels ngram -k "growing and not many"

A target is the name of an op, whose `tests/ops/test_<op>*.py` run, a test file, or a case of
`benchmarks/sanitize_engine.py`: a small model through the whole engine. memcheck looks for accesses
outside of allocations, racecheck for conflicts in shared memory, synccheck for barriers that not
all threads reach. For memcheck of tests each tensor is a separate allocation, without PyTorch's
caching allocator; graphs cannot be captured that way, so tests that capture run under the other
tools only, and the engine keeps the caching allocator. PyTorch's own kernels are not watched; with
--kernels only kernels with that text in their name are watched, which is faster.
so named, which is faster.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment
from benchmarks.figures import save
from benchmarks.sanitize_engine import CASES

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck")
CAPTURING = "not replay and not graph"
NOT_WATCHED = ("at::", "at_cuda", "cub::", "cutlass", "nvjet")  # parts of kernels' names
STEPS = ROOT / "tests/engine/test_gpu_steps.py"  # a small model
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")
_ENDING = re.compile(r"\d+ (?:passed|failed)|\w+: done")
_HAZARD = re.compile(
    r"^=+ +(?!.*SUMMARY)(?:Invalid|Error|Warning|Race|Barrier|.*hazard|.*uninitialized).*$", re.M
)


def default_targets() -> list[str]:
    """Every op, then the steps of a small model, then whole engines."""
    files = (path.stem for path in (ROOT / "tiercel/ops").glob("[a-z]*.py"))
    ops = sorted(name for name in files if not name.endswith(("_torch", "_plan")))
    return [*ops, str(STEPS), *CASES]


def test_files(target: str) -> list[str]:
    """The test files of an op's name, or the file itself.

    Raises:
        SystemExit: there is no such test.
    """
    found = sorted((ROOT / "tests/ops").glob(f"test_{target}*.py"))
    found = found or [path for path in (Path(target),) if path.is_file()]
    if not found:
        raise SystemExit(f"{target}: no op and no test file.")
    return [str(path) for path in found]


def sanitize(tool: str, target: str, selected: str, kernels: str, limit_s: float) -> dict[str, Any]:
    """Run one target under one tool: the messages of tool and tests, and whether both passed."""
    command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9"]
    command += ["--target-processes=application-only", "--print-limit=5"]
    command += ["--report-api-errors=no"] if tool == "memcheck" else []
    command += (
        [f"--kernel-name=kernel_substring={kernels}"]
        if kernels
        else [f"--kernel-name-exclude=kernel_substring={name}" for name in NOT_WATCHED]
    )
    variables = dict(os.environ)
    if target in CASES:
        command += [sys.executable, "-m", "benchmarks.sanitize_engine", target]
    else:
        if tool == "memcheck":
            selected = f"({selected}) and {CAPTURING}" if selected else CAPTURING
            variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        command += [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
        command += ["-k", selected] if selected else []
        command += test_files(target)
    start = time.perf_counter()
    row: dict[str, Any] = {"tool": tool, "target": Path(target).name}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that the tests end with the tool
    )
    try:
        output = process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
        return row | {"is_clean": False, "summary": f"not done after {limit_s:.0f} s",
                      "found": "\n".join(_HAZARD.findall(output)[:10])}  # fmt: skip
    summary = _SUMMARY.findall(output)
    tests = [line for line in output.splitlines() if _ENDING.match(line)]
    return row | {
        "seconds": round(time.perf_counter() - start, 1),
        "is_clean": process.returncode == 0 and bool(summary) and bool(tests),
        "summary": "; ".join([*summary, *tests]) if summary and tests else output[-500:],
        "found": "\n".join(_HAZARD.findall(output)[:10]),
    }


def main() -> None:
    """Print a line for each tool and target; ends with status 1 unless all are clean."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", default=default_targets())
    parser.add_argument("--tool", choices=TOOLS, nargs="*", default=TOOLS)
    parser.add_argument("-k", default="", help="of these tests, those that pytest selects so")
    parser.add_argument("--kernels", default="", help="watch kernels with this in their name alone")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of one target")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU: nothing to watch.")
    runs = [(tool, target, options.k, options.kernels, options.limit)
            for target in options.targets for tool in options.tool]  # fmt: skip
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda run: sanitize(*run), runs):
            rows.append(row)
            state = "clean" if row["is_clean"] else "NOT CLEAN"
            print(f"{row['target']:<24}{row['tool']:<12}{state:<11}{row['summary']}", flush=True)
            for line in row["found"].splitlines():
                print(f"    {line}", flush=True)
    save(options.out, environment(torch.device("cuda")), rows)
    if not all(row["is_clean"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
