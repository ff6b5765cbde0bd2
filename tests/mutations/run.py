"""Applies mutations one by one to copies of the repository and runs the tests that must fail.

    python -m tests.mutations.run                        # all; make mutants
    python -m tests.mutations.run --only models-3 serve  # by name or by area
    python -m tests.mutations.run --sample 15            # every n-th

Before, all named tests run once without a mutation: they must pass. Ends with 0 if every mutation
that is not marked equivalent was noticed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NoReturn

from tests.mutations.mutation import ROOT, Mutation, read_mutations

TIMEOUT_S = 600  # a fault may hang its tests: that is noticed too
KINDS = ("killed", "survived", "equivalent", "broken")
_PASSED, _FAILED, _COLLECTION_FAILED = 0, 1, 2  # exit statuses of pytest
# Libraries whose imports take most of a short test's time: a fork has them already.
_PRELOADED = ["torch", "numpy", "pytest", "hypothesis", "msgspec", "tokenizers", "transformers"]
_ENVIRONMENT = {
    "PYTHONDONTWRITEBYTECODE": "1",  # bytecode is chosen by time and size, which may be kept
    "OMP_NUM_THREADS": "1",
}
_FORKS = multiprocessing.get_context("forkserver")


def copy_repository(target: Path) -> None:
    """Copy the files that git knows or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests in a copy until one fails; returns pytest's status and the end of its output."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "output"
        process = _FORKS.Process(target=_run_pytest, args=(folder, list(tests), output))
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
            process.join()
            return _FAILED, f"no end after {TIMEOUT_S} s"
        text = output.read_text(errors="replace") if output.exists() else ""
        return process.exitcode, text[-3000:]


def _run_pytest(folder: Path, tests: Sequence[str], output: Path) -> NoReturn:
    """In a fork that has imported libraries and nothing of this repository's."""
    os.setsid()
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tests", "tiercel", "benchmarks"):
            del sys.modules[name]
    sys.path[:] = [str(folder), *(p for p in sys.path if p not in ("", str(ROOT)))]
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ["PYTHONPATH"] = str(folder)
    os.chdir(folder)
    pytest = importlib.import_module("pytest")
    sys.exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])))


def try_mutation(mutation: Mutation, folder: Path) -> str:
    """Apply one mutation to a copy, run its tests, take it back; returns what became of it.

    Returns:
        "killed", "survived", "equivalent", or "broken: ..." where the tests could not run.
    """
    path = folder / mutation.file
    original = path.read_text()
    path.write_text(mutation.apply(original))
    try:
        status, output = run_tests(folder, mutation.tests)
    finally:
        path.write_text(original)
    if status in (_FAILED, _COLLECTION_FAILED) or status < 0:  # or by a signal
        return "killed"
    if status != _PASSED:
        return f"broken: pytest ended with {status}\n{output}"
    return "equivalent" if mutation.equivalent else "survived"


def choose(mutations: Sequence[Mutation], only: Sequence[str], sample: int) -> list[Mutation]:
    """Those of some areas or names, or an even sample."""
    chosen = [m for m in mutations if not only or m.name in only or m.area in only]
    return chosen if not sample else chosen[:: max(1, len(chosen) // sample)][:sample]


def check_original(folders: Sequence[Path], mutations: Sequence[Mutation]) -> None:
    """Run all named tests once without a mutation, each file's in one of the copies.

    Raises:
        SystemExit: they do not pass, so that nothing would follow from a failure.
    """
    files: dict[str, list[str]] = {}
    for test in sorted({test for mutation in mutations for test in mutation.tests}):
        files.setdefault(test.partition("::")[0], []).append(test)
    shares: list[list[str]] = [[] for _ in folders]
    for number, tests in enumerate(files.values()):
        shares[number % len(shares)] += tests
    used = [share for share in shares if share]  # no tests would mean all tests
    with ThreadPoolExecutor(len(folders)) as pool:
        for status, output in pool.map(run_tests, folders, used):
            if status != _PASSED:
                raise SystemExit(f"without any mutation the tests do not pass:\n{output}")


def run_all(mutations: Sequence[Mutation], jobs: int) -> dict[str, str]:
    """Try mutations in `jobs` copies side by side; returns what became of each by name."""
    results: dict[str, str] = {}
    os.environ.update(_ENVIRONMENT)
    _FORKS.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copies = [Path(scratch) / str(number) for number in range(jobs)]
        free: Queue[Path] = Queue()
        for folder in copies:
            copy_repository(folder)
            free.put(folder)
        check_original(copies, mutations)

        def work(mutation: Mutation) -> None:
            folder = free.get()
            try:
                results[mutation.name] = result = try_mutation(mutation, folder)
            finally:
                free.put(folder)
            print(f"{result.split(':')[0]:10} {mutation.name:17} {mutation.file}", flush=True)
            if result == "survived":
                print(f"           - {mutation.old!r}\n           + {mutation.new!r}", flush=True)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(work, mutations))
    return results


def print_table(mutations: Sequence[Mutation], results: dict[str, str]) -> None:
    """Print how many of each area were killed, and all areas together."""
    print(f"\n{'area':14}" + "".join(f"{kind:>12}" for kind in KINDS))
    for area in [*sorted({mutation.area for mutation in mutations}), "all"]:
        of_area = [results[m.name] for m in mutations if area in (m.area, "all")]
        numbers = (sum(result.startswith(kind) for result in of_area) for kind in KINDS)
        print(f"{area:14}" + "".join(f"{number:12}" for number in numbers))


def main(arguments: Sequence[str]) -> int:
    """Parse the arguments, run, and print a table by area."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], help="names or areas")
    parser.add_argument("--sample", type=int, default=0, help="so many, evenly spread")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write what became of each")
    options = parser.parse_args(arguments)
    mutations = choose(read_mutations(), options.only, options.sample)
    results = run_all(mutations, options.jobs)
    print_table(mutations, results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    for name, result in results.items():
        if result.startswith("broken"):
            print(f"\n{name}: {result}")
    return 0 if set(results.values()) <= {"killed", "equivalent"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
