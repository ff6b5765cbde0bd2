"""Many users at once, some of whom leave: nothing is lost, crossed, cut or left behind."""

import asyncio
import json
import random
import time

import httpx
import pytest

from tests.patience import PATIENCE_S, wait_for
from tests.serve.harness import NAME, check_alive, children_of, num_descriptors, start_server

pytestmark = pytest.mark.reliability

NUM_WORKERS = 64
WORDS = [
    "red",
    "blue",
    "green",
    "stone",
    "river",
    "cloud",
    "seven",
    "nine",
    "moon",
    "salt",
    "tiger",
    "glass",
]


def secrets(count):
    """Prompts that differ from their first words on."""
    draw = random.Random(5)
    return [
        f"user {i} keeps {' '.join(draw.choices(WORDS, k=draw.randrange(2, 40)))}"
        for i in range(count)
    ]


def body_of(prompt, kind):
    body = {"model": NAME, "temperature": 0, "max_tokens": 24, "stream": kind != "plain"}
    if kind == "chat":
        return body | {"messages": [{"role": "user", "content": prompt}]}
    return body | {"prompt": prompt}


async def ask(client, prompt, kind, leaves_after=None):
    """The answer's text; None where the client left early."""
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    if kind == "plain":
        timeout = 120 if leaves_after is None else leaves_after
        try:
            response = await client.post(path, json=body_of(prompt, kind), timeout=timeout)
        except httpx.TimeoutException:
            return None
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]
    text, reasons, has_end = "", [], False
    async with client.stream("POST", path, json=body_of(prompt, kind), timeout=120) as response:
        assert response.status_code == 200
        started = time.monotonic()
        async for line in response.aiter_lines():
            if leaves_after is not None and time.monotonic() - started > leaves_after:
                return None
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                has_end = True
                continue
            for choice in json.loads(line[6:])["choices"]:
                piece = choice["delta"].get("content") if kind == "chat" else choice["text"]
                text += piece or ""
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert has_end
    assert len(reasons) == 1, "an answer ends once"
    return text


async def soak(url, prompts, expected, *, count, seconds, share_leaving):
    """Workers ask until `count` requests or `seconds` have passed; returns how many were whole."""
    draw, left, whole = random.Random(1), [count], [0]
    deadline = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=NUM_WORKERS)

    async def work(client):
        while left[0] > 0 and time.monotonic() < deadline:
            left[0] -= 1
            prompt, kind = draw.choice(prompts), draw.choice(("plain", "stream", "chat"))
            leaves = draw.uniform(0.001, 0.3) if draw.random() < share_leaving else None
            text = await ask(client, prompt, kind, leaves)
            if text is not None:
                assert text == expected[prompt, kind == "chat"], "another answer than alone"
                whole[0] += 1

    async with (
        httpx.AsyncClient(base_url=url, limits=limits) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(NUM_WORKERS):
            tasks.create_task(work(client))
    return whole[0]


async def answers_alone(url, prompts):
    async with httpx.AsyncClient(base_url=url) as client:
        return {
            (prompt, kind == "chat"): await ask(client, prompt, kind)
            for prompt in prompts
            for kind in ("plain", "chat")
        }


def resident_mib(pids):
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/statm") as file:
            total += int(file.read().split()[1]) * 4096
    return total / 2**20


def gauges(server):
    lines = [line for line in server.get("/metrics").text.splitlines() if "{" in line]
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return [values[f"tiercel:{name}"] for name in names]


def wait_idle(server):
    wait_for(lambda: gauges(server) == [0.0, 0.0, 0.0])


@pytest.fixture(scope="module")
def small_server(tiny, tmp_path_factory):
    """Few rows, and blocks for a few of them only."""
    log_path = tmp_path_factory.mktemp("log") / "soak.log"
    options = ("--max-num-seqs", 8, "--dtype", "float32", "--max-model-len", 512)
    with start_server(tiny, *options, log_path=log_path) as running:
        yield running


def run(server, *, count, seconds):
    prompts = secrets(12)
    expected = asyncio.run(answers_alone(server.url, prompts))
    pids = [server.process.pid, *children_of(server.process.pid)]
    asyncio.run(soak(server.url, prompts, expected, count=100, seconds=seconds, share_leaving=0.2))
    wait_idle(server)
    before, files = resident_mib(pids), {pid: num_descriptors(pid) for pid in pids}
    whole = asyncio.run(
        soak(server.url, prompts, expected, count=count, seconds=seconds, share_leaving=0.2)
    )
    wait_idle(server)
    check_alive(server)
    wait_for(lambda: all(num_descriptors(pid) <= n + 2 for pid, n in files.items()))  # that linger
    assert [server.process.pid, *children_of(server.process.pid)] == pids, "nothing was restarted"
    return whole, before, resident_mib(pids)


def test_users_never_see_each_other(small_server):
    whole, before, after = run(small_server, count=150, seconds=5 * PATIENCE_S)
    assert whole > 75
    assert after < before * 1.1


@pytest.mark.slow
def test_two_thousand_requests(small_server):
    whole, before, after = run(small_server, count=2000, seconds=600)
    assert whole > 1400
    assert after < before * 1.05
