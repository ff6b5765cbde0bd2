"""llama.cpp for benchmarks/e2e_cpu.py, by its own program `llama-bench`, which needs no package.

Each measurement is a run of the program: it loads the model, decodes or reads once to warm up, and
reports the rate of a repetition. Its tokens are random and none is sampled, so nothing is compared
but the rate. Several requests and drafts are beyond it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.e2e_cpu_pipe import serve


class LlamaBench:
    """A llama-bench and a model.

    Args:
        program: its path.
        settings: of `Worker`.
    """

    def __init__(self, program: str, settings: dict[str, Any]) -> None:
        self.command = [program, "-m", settings["model"], "-t", str(settings["threads"])]
        self.command += ["-ngl", "0", "-r", "1", "-o", "json"]

    def describe(self) -> dict[str, Any]:
        """Build and options; a run of one token shows that the program works."""
        found = self._run(prompt_tokens=0, new_tokens=1, depth=0)
        return {
            "engine": "llama_bench",
            "llama_cpp": f"{found['build_commit']}, llama-bench",
            "processor": found["cpu_info"],
            "backends": found["backends"],
            "flash_attention": str(found["flash_attn"]),
            "api": "llama-bench: llama_decode of one random token, no sampler",
        }

    def decode(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        """Decode after a prompt of the same length."""
        return {"tokens_per_second": self._run(0, new_tokens - 1, len(prompt))["avg_ts"]}

    def read(self, prompt: list[int]) -> dict[str, Any]:
        """The rate of a prompt of the same length."""
        return {"tokens_per_second": self._run(len(prompt), 0, 0)["avg_ts"]}

    def batch(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Nothing: one request only."""

    def _run(self, prompt_tokens: int, new_tokens: int, depth: int) -> dict[str, Any]:
        sizes = {"-p": prompt_tokens, "-n": new_tokens, "-d": depth}
        options = [str(word) for pair in sizes.items() for word in pair]
        done = subprocess.run(
            [*self.command, *options], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{self.command[0]} ended with {done.returncode}")
        (row,) = json.loads(done.stdout)
        return dict(row)


if __name__ == "__main__":
    program = sys.argv.pop(1)
    serve(lambda settings: LlamaBench(program, settings))
