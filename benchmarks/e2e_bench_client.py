"""Cost of the client of `tiercel bench serve`: processor time for each streamed token.

A child process streams one token per event, as fast as the client reads. There is no physical
floor; the question is whether the client can keep up with a server. Peer: httpx, which reads
the same stream line by line and decodes it with the same library.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop

try:
    import httpx
except ImportError:  # a peer, not a dependency
    httpx = None

from benchmarks.figures import about, save
from tiercel.bench import environment
from tiercel.bench.completions import Completion, CompletionServer
from tiercel.bench.http_client import HttpClient, parse_address

TOKENS = 200  # of each answer
EVENT = {
    "id": "cmpl-0123456789abcdef",
    "object": "text_completion",
    "created": 1800000000,
    "model": "a-model",
    "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}],
    "usage": None,
}
SERVER = """
import asyncio, sys, uvloop
chunks = [bytes.fromhex(line) for line in sys.stdin.read().split()]
class Answer(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport, self.data = transport, b""
    def data_received(self, data):
        self.data += data
        head, _, body = self.data.partition(b"\\r\\n\\r\\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\\r\\n")[0])
        if len(body) >= size:
            self.data = body[size:]
            asyncio.get_running_loop().create_task(self.answer())
    async def answer(self):
        self.transport.write(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n")
        for chunk in chunks:
            self.transport.write(chunk)
            await asyncio.sleep(0.001)  # an event of its own, as from an engine's step
async def main():
    server = await asyncio.get_running_loop().create_server(Answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
uvloop.run(main())
"""


def start_server() -> tuple[subprocess.Popen[str], int]:
    """The child process and its port."""
    usage = EVENT | {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": TOKENS}}
    payloads = [json.dumps(EVENT)] * TOKENS + [json.dumps(usage), "[DONE]"]
    events = [f"data: {payload}\n\n".encode() for payload in payloads]
    chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in events] + [b"0\r\n\r\n"]
    child = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n".join(chunk.hex() for chunk in chunks))
    child.stdin.close()
    return child, int(child.stdout.readline())


async def ours(port: int, concurrency: int, rounds: int) -> int:
    client = HttpClient(parse_address(f"http://127.0.0.1:{port}"), api_key=None, timeout_s=60)
    server = CompletionServer(client, "a-model", temperature=0.0)

    async def work() -> int:
        tokens = 0
        for index in range(rounds):
            sample = await server.measure(Completion([1, 2], TOKENS), index=index, began_s=0.0)
            assert sample.error is None, sample
            tokens += sample.completion_tokens
        return tokens

    found = await asyncio.gather(*(work() for _ in range(concurrency)))
    client.close()
    return sum(found)


async def with_httpx(port: int, concurrency: int, rounds: int) -> int:
    decode = msgspec.json.Decoder().decode
    url = f"http://127.0.0.1:{port}/v1/completions"

    async def work() -> int:
        tokens = 0
        for _ in range(rounds):
            times = []
            async with client.stream("POST", url, json={"prompt": [1, 2]}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data:") and line != "data: [DONE]":
                        times.append(time.perf_counter())
                        usage = decode(line[5:])["usage"]
                        tokens += usage["completion_tokens"] if usage else 0
        return tokens

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        return sum(await asyncio.gather(*(work() for _ in range(concurrency))))


def measure(
    run: Callable[[int, int, int], Awaitable[int]], port: int, concurrency: int, rounds: int
) -> dict[str, float]:
    async def main() -> dict[str, float]:
        await run(port, concurrency, 1)  # warm-up
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        tokens = await run(port, concurrency, rounds)
        cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
        return {
            "tokens": tokens,
            "cpu_us_per_token": 1e6 * cpu_s / tokens,
            "tokens_per_core_second": tokens / cpu_s,
            "tokens_per_second": tokens / wall_s,
        }

    return uvloop.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    child, port = start_server()
    results = []
    try:
        for concurrency in (1, 16, 64):
            row: dict[str, Any] = {"concurrency": concurrency, "tokens_per_answer": TOKENS}
            row["ours"] = measure(ours, port, concurrency, arguments.rounds)
            if httpx is not None:
                row["httpx"] = measure(with_httpx, port, concurrency, arguments.rounds)
            results.append(row)
            costs = ", ".join(
                f"{name} {figures['cpu_us_per_token']:.1f} us a token"
                for name, figures in row.items()
                if isinstance(figures, dict)
            )
            print(f"{concurrency:>3} at once: {costs}")
    finally:
        child.kill()
        child.wait()
    command = environment.command_line(sys.argv)
    head = about(command, environment.utc_now(), environment.hardware())
    head["versions"] |= environment.versions("uvloop", "httptools", "httpx", "msgspec")
    save(arguments.out, head, results)


if __name__ == "__main__":
    main()
