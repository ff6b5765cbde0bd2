"""Runs one command line per file in a fork of a process that has imported the command already.

    python -m tests.cli.fork_driver ARGUMENT... -- FILE...     (each FILE in turn replaces "{}")

So a hundred files cost seconds, and each still has a fresh process with its own peak of memory.
Writes one JSON object per file to standard output.
"""

import json
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

from tiercel.cli.main import run

LIMIT_S = 120


def run_forked(arguments):
    """Run one command line in a child; returns its status, output and use of memory."""
    sys.stdout.flush()  # else the child prints the parent's buffered output again
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT_S)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            status = run(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(100 if "torch" in sys.modules else status)
        _, status, usage = os.wait4(child, 0)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
        return {
            "status": os.waitstatus_to_exitcode(status),
            "stdout": texts[0],
            "stderr": texts[1],
            "processor_seconds": usage.ru_utime + usage.ru_stime,
            "peak_bytes": usage.ru_maxrss * 1024,
        }


def main():
    end = sys.argv.index("--")
    arguments, paths = sys.argv[1:end], map(Path, sys.argv[end + 1 :])
    # This import brings in all that the command needs.
    run(["missing-file" if word == "{}" else word for word in arguments])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    base = run_forked(["--help"])["peak_bytes"]
    for path in paths:
        result = run_forked([str(path) if word == "{}" else word for word in arguments])
        result["name"] = path.name
        result["above_import_bytes"] = result["peak_bytes"] - base
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
