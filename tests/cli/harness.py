"""Runs the command line as a user does: in a separate process, with a clean environment."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tiercel.cli.main"]
_KEPT = ("TIERCEL_CACHE", "TIERCEL_OFFLINE")


def environment(**changes):
    """The environment without the developer's options, plus `changes`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TIERCEL_") or name in _KEPT
    }
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "100"} | changes


def tiercel(*arguments, stdin="", env=None, timeout=300, **kwargs):
    """Run `tiercel ARGUMENTS`; returns the completed process with text output."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment(**(env or {})),
        timeout=timeout,
        check=False,
        **kwargs,
    )


def error_line(process, status=1):
    """The one line that a failed command prints, with nothing on standard output."""
    assert process.returncode == status, process.stderr
    assert process.stdout == ""
    lines = process.stderr.splitlines()
    assert len(lines) == 1, process.stderr
    assert lines[0].startswith("error: ")
    return lines[0]
