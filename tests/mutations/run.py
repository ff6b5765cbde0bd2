"""Applies mutations one by one to copies of the repository and runs the tests that must fail.

    python -m tests.mutations.run                        # all; make mutants
    python -m tests.mutations.run --only models-3 serve  # by name or by area
    python -m tests.mutations.run --sample 15            # every n-th

Before, all named tests run once without a mutation: they must pass. Ends with 0 if every mutation
that is not marked equivalent was noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from tests.mutations.mutation import ROOT, Mutation, read_mutations

TIMEOUT_S = 600  # a fault may hang its tests: that is noticed too
KINDS = ("killed", "survived", "equivalent", "broken")
_PASSED, _FAILED, _COLLECTION_FAILED = 0, 1, 2  # exit statuses of pytest


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
    kept = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST_")}
    # Bytecode is chosen by time and size of its source, which a mutation may keep.
    changed = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=kept | changed,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _FAILED, f"no end after {TIMEOUT_S} s"
    return done.returncode, (done.stdout + done.stderr)[-3000:]


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
    if status in (_FAILED, _COLLECTION_FAILED):
        return "killed"
    if status != _PASSED:
        return f"broken: pytest ended with {status}\n{output}"
    return "equivalent" if mutation.equivalent else "survived"


def choose(mutations: Sequence[Mutation], only: Sequence[str], sample: int) -> list[Mutation]:
    """Those of some areas or names, or an even sample."""
    chosen = [m for m in mutations if not only or m.name in only or m.area in only]
    return chosen if not sample else chosen[:: max(1, len(chosen) // sample)][:sample]


def run_all(mutations: Sequence[Mutation], jobs: int) -> dict[str, str]:
    """Try mutations in `jobs` copies side by side; returns what became of each by name."""
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        folders: Queue[Path] = Queue()
        for number in range(jobs):
            folder = Path(scratch) / str(number)
            copy_repository(folder)
            folders.put(folder)
        tests = sorted({test for mutation in mutations for test in mutation.tests})
        status, output = run_tests(folders.queue[0], tests)
        if status != _PASSED:
            raise SystemExit(f"without any mutation the tests do not pass:\n{output}")

        def work(mutation: Mutation) -> None:
            folder = folders.get()
            try:
                results[mutation.name] = result = try_mutation(mutation, folder)
            finally:
                folders.put(folder)
            print(
                f"{result.partition(chr(10))[0]:10} {mutation.name:14} {mutation.file}", flush=True
            )
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
