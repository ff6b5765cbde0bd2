"""An engine in a process of its own, asked by lines of JSON over its pipes.

    {"method": "decode", "arguments": {"prompt": [1, 2, 3], "new_tokens": 16}}    to the process
    {"tokens_per_second": 141.5, ...}                                             its answer

The process may run in the environment of another project: nothing here needs a package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CLOSE_S = 30.0


class EngineError(Exception):
    """The process of an engine ended early."""


class Worker:
    """The asking side.

    Args:
        command: program of the process; the settings follow as one argument.
        settings: of the engine.
        environment: variables of the process.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: Mapping[str, Any],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.command = [*command, json.dumps(settings)]
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, method: str, **arguments: object) -> Any:
        """Call a method of the engine and wait for its result.

        Raises:
            EngineError: the process has ended; its error is on the standard error stream.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(
                json.dumps({"method": method, "arguments": arguments}),
                file=self.process.stdin,
                flush=True,
            )
        except BrokenPipeError:
            answer = ""
        else:
            answer = self.process.stdout.readline()
        if not answer:
            self.process.wait()
            raise EngineError(f"{method}: {' '.join(self.command[:3])} ended")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(CLOSE_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def serve(make: Callable[[dict[str, Any]], object]) -> None:
    """The answering side: make an engine of the settings, answer until the input ends."""
    # Libraries may print: what they print goes to the standard error stream.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        engine = make(json.loads(sys.argv[1]))
        for line in sys.stdin:
            task = json.loads(line)
            result = getattr(engine, task["method"])(**task["arguments"])
            print(json.dumps(result), file=answers, flush=True)
