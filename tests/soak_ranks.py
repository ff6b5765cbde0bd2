"""A server of several GPUs under 64 clients, some of whom leave, which loses a rank half way.

    python -m tests.soak_ranks --gpus 2 --seconds 120 --out FILE.json

Ends with 0 if no answer was lost or crossed. Lost is a request that neither got its answer nor was
told by 503 that the engine starts again; crossed is an answer that belongs to another prompt. One
that differs from the answer alone is counted too: on GPUs other tokens of a batch may round a sum
otherwise. Memory is that of all processes and of the GPUs when nothing runs, at the start and
after each half. `--gpus 0` takes two processes of a CPU, to test this file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import torch

from tests.gguf_files import tiny_model
from tests.serve.harness import RunningServer, children_of, start_server
from tests.serve.test_soak import (
    NUM_WORKERS,
    answers_alone,
    body_of,
    resident_mib,
    secrets,
    wait_idle,
)

SHARE_LEAVING = 0.2
RESTART_S = 120
RESTARTING = "engine_restarting"


class ToldError(Exception):
    """The engine starts again, as a status of 503 or an event says."""


async def ask_or_be_told(client, prompt, kind, leaves_after):
    """The answer's text; None where the client left early."""
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    text, is_done, started = "", False, time.monotonic()
    async with client.stream("POST", path, json=body_of(prompt, kind), timeout=120) as response:
        if response.status_code == 503:
            raise ToldError
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}")
        async for line in response.aiter_lines():
            if leaves_after is not None and time.monotonic() - started > leaves_after:
                return None
            line = line.removeprefix("data: ")
            if line == "[DONE]":
                is_done = True
            elif line.startswith("{"):
                told = json.loads(line)
                if "error" in told:
                    raise ToldError if told["error"]["code"] == RESTARTING else ValueError(line)
                for choice in told["choices"]:
                    piece = choice["delta"].get("content") if kind == "chat" else choice["text"]
                    text += piece or ""
    if kind != "plain" and not is_done:
        raise ValueError("a stream without an end")
    return text


async def soak(url, prompts, expected, seconds, seed):
    """What became of all requests, by name."""
    found, draw = Counter(), random.Random(seed)
    owner = {text: prompt for (prompt, _), text in expected.items()}
    deadline = time.monotonic() + seconds

    async def work(client):
        while time.monotonic() < deadline:
            prompt, kind = draw.choice(prompts), draw.choice(("plain", "stream", "chat"))
            leaves = draw.uniform(0.001, 0.3) if draw.random() < SHARE_LEAVING else None
            try:
                text = await ask_or_be_told(client, prompt, kind, leaves)
            except ToldError:
                found["told"] += 1
                await asyncio.sleep(0.2)
                continue
            except (ValueError, httpx.HTTPError) as error:
                found["lost"] += 1
                sys.stderr.write(f"lost: {type(error).__name__}: {error!s:.120}\n")
                continue
            if text is None:
                found["left"] += 1
            elif text == expected[prompt, kind == "chat"]:
                found["equal"] += 1
            else:
                found["crossed" if owner.get(text, prompt) != prompt else "different"] += 1

    limits = httpx.Limits(max_connections=NUM_WORKERS)
    async with httpx.AsyncClient(base_url=url, limits=limits) as client:
        await asyncio.gather(*(work(client) for _ in range(NUM_WORKERS)))
    return found


def memory(server: RunningServer, gpus: int) -> dict[str, float]:
    """MiB of all processes of the server, and of each GPU."""
    pids = [server.process.pid, *children_of(server.process.pid)]
    used = {"resident_mib": round(resident_mib(pids))}
    for index in range(gpus):
        free, total = torch.cuda.mem_get_info(index)
        used[f"gpu{index}_mib"] = round((total - free) / 2**20)
    return used


def last_rank(server: RunningServer) -> int:
    """The process of the last rank."""
    ranks = [
        pid
        for pid in children_of(server.process.pid)
        if b"tiercel.ipc.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return ranks[-1]


async def run_and_kill(server, prompts, expected, seconds):
    """Soak, and kill a rank in the middle."""

    async def kill():
        await asyncio.sleep(seconds / 3)
        os.kill(last_rank(server), signal.SIGKILL)

    found, _ = await asyncio.gather(soak(server.url, prompts, expected, seconds, 2), kill())
    return found


def measure(size: int, gpus: int, seconds: float, folder: Path) -> list[dict[str, object]]:
    """Both halves, with the memory before, between and after."""
    sizes = {"hidden": 256, "head_dim": 128, "ff": 512} if gpus else {"head_dim": 32}
    options = {"qtype": "Q4_K", **sizes} if gpus else sizes
    model = tiny_model(folder / "tiny.gguf", "qwen3", **options)
    arguments = ["-tp", size, "--max-num-seqs", 16, "--max-model-len", 512]
    arguments += ["--gpu-memory-utilization", 0.1] if gpus else ["--device", "cpu"]
    env = {} if gpus else {"TIERCEL_CPU_RANKS": "1"}
    prompts = secrets(24)
    with start_server(model, *arguments, log_path=folder / "log", env=env) as server:
        expected = asyncio.run(answers_alone(server.url, prompts))
        asyncio.run(soak(server.url, prompts, expected, seconds / 8, 0))  # memory settles
        wait_idle(server)
        rows: list[dict[str, object]] = [{"name": "at the start", **memory(server, gpus)}]
        found = asyncio.run(soak(server.url, prompts, expected, seconds / 2, 1))
        wait_idle(server)
        rows.append({"name": "first half", **found, **memory(server, gpus)})
        found = asyncio.run(run_and_kill(server, prompts, expected, seconds / 2))
        server.wait_ready(RESTART_S)
        wait_idle(server)
        rows.append({"name": "a rank killed", **found, **memory(server, gpus)})
        assert "SIGKILL" in server.log, "the death was noticed"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options.gpus or 2, options.gpus, options.seconds, Path(folder))
    for row in rows:
        sys.stdout.write(f"{row}\n")
    if options.out is not None:
        options.out.write_text(json.dumps({"rows": rows}, indent=1))
    bad = sum(int(row.get(name, 0)) for row in rows for name in ("lost", "crossed"))
    raise SystemExit(f"{bad} answers were lost or crossed" if bad else 0)


if __name__ == "__main__":
    main()
