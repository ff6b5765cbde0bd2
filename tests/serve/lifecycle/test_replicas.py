"""A server with several engines: all answer, one is lost, and all end with the server."""

import contextlib
import os
import random
import re
import signal
import subprocess
import threading

import httpx
import pytest

from tests.cli.harness import error_line, tiercel
from tests.patience import PATIENCE_S, wait_for
from tests.serve.harness import NAME, check_alive, children_of, is_running, start_server
from tests.serve.lifecycle.test_ranks import CPU_RANKS, processes_of

pytestmark = pytest.mark.reliability
TWO = ("--replicas", 2, "--device", "cpu")
LONG = {"model": NAME, "prompt": "a", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    log_path = tmp_path_factory.mktemp("log") / "server.log"
    with start_server(tiny, *TWO, log_path=log_path) as running:
        yield running


def values_of(server, name):
    """A metric by the number of the engine."""
    pattern = rf'^tiercel:{name}{{engine="(\w+)",model_name="{NAME}"}} (\S+)$'
    return {e: float(v) for e, v in re.findall(pattern, server.get("/metrics").text, re.MULTILINE)}


class Call(threading.Thread):
    """A long request on a thread of its own."""

    def __init__(self, server, prompt, num_tokens=1900):
        super().__init__()
        self.server, self.body = server, {**LONG, "prompt": prompt, "max_tokens": num_tokens}
        self.response = None
        self.start()

    def run(self):
        self.response = self.server.post("/v1/completions", self.body)


def test_all_engines_answer(server):
    """Each route; requests that come together go to both engines."""
    assert len(processes_of(server)) == 2
    assert " engines=2" in server.log
    assert server.get("/ready").json() == {"status": "ready", "engines_ready": 2}
    assert values_of(server, "engine_ready") == {"0": 1, "1": 1}
    before = values_of(server, "generation_tokens_total")
    calls = [Call(server, letter, 400) for letter in "abcd"]
    for call in calls:
        call.join()
        assert call.response.json()["usage"]["completion_tokens"] == 400
    after = {engine: value + 800 for engine, value in before.items()}
    wait_for(lambda: values_of(server, "generation_tokens_total") == after)
    chat = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    assert server.post("/v1/chat/completions", chat).status_code == 200
    score = {"model": NAME, "query": "a", "items": ["b", "c"], "labels": ["d", "e"]}
    assert server.post("/v1/score", score).status_code == 200
    assert values_of(server, "score_items_total") == {"all": 2}
    many = {**LONG, "n": 5, "max_tokens": 4, "temperature": 1}
    choices = server.post("/v1/completions", many).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4]
    check_alive(server)


def test_one_engine_is_lost_and_nobody_else_notices(server):
    calls = [Call(server, letter) for letter in "ab"]
    wait_for(lambda: set(values_of(server, "num_requests_running").values()) == {1})
    os.kill(processes_of(server)[0], signal.SIGKILL)
    wait_for(
        lambda: values_of(server, "engine_ready")["0"] + values_of(server, "engine_ready")["1"] < 2
    )
    for _ in range(3):
        check_alive(server)
    for call in calls:
        call.join()
    lost, kept = sorted((call.response for call in calls), key=lambda r: -r.status_code)
    assert (lost.status_code, kept.status_code) == (503, 200)
    assert lost.json()["error"]["code"] == "engine_restarting"
    assert kept.json()["usage"]["completion_tokens"] == 1900
    wait_for(lambda: server.get("/ready").json().get("engines_ready") == 2, 3 * PATIENCE_S)
    assert len(processes_of(server)) == 2
    assert values_of(server, "engine_restarts_total") in ({"0": 1, "1": 0}, {"0": 0, "1": 1})
    wait_for(lambda: re.search(r"engine \d is ready again", server.log))
    assert re.search(r"engine \d process ended: it was ended by signal SIGKILL", server.log)
    check_alive(server)


def test_clients_that_leave_free_their_rows(server):
    for letter in "abcdef":
        with server.connect() as sock:
            body = b'{"model": "%s", "prompt": "%s", "max_tokens": 1900, "ignore_eos": true}'
            body %= (NAME.encode(), letter.encode())
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            wait_for(lambda: sum(values_of(server, "num_requests_running").values()) > 0)
    wait_for(lambda: set(values_of(server, "num_requests_running").values()) == {0})
    wait_for(lambda: set(values_of(server, "kv_cache_usage_perc").values()) == {0})
    check_alive(server)


def test_no_answer_is_lost_or_crossed_while_an_engine_dies(server):
    """Eight clients with prompts of their own, some of which leave."""
    num_restarts = sum(values_of(server, "engine_restarts_total").values())
    bodies = [
        {"model": NAME, "prompt": f"{n} the thin man {n * n}", "max_tokens": 20 + 40 * n,
         "temperature": 0, "ignore_eos": True} for n in range(8)
    ]  # fmt: skip
    expected = [text_of(server.post("/v1/completions", body)) for body in bodies]
    assert len(set(expected)) == 8
    results, is_over = [[] for _ in bodies], threading.Event()

    def use(number):
        draw = random.Random(number)
        while not is_over.wait(draw.random() / 4):
            if draw.random() < 0.2:
                with contextlib.suppress(httpx.TimeoutException):
                    httpx.post(f"{server.url}/v1/completions", json=bodies[number], timeout=0.05)
                continue
            response = server.post("/v1/completions", bodies[number])
            if response.status_code == 200:
                results[number].append(text_of(response))
            else:
                assert response.json()["error"]["code"] in (
                    "engine_restarting",
                    "engine_died_twice",
                )
                results[number].append(None)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: sum(map(len, results)) >= 8)
    wait_for(lambda: 0 not in values_of(server, "num_requests_running").values())
    os.kill(processes_of(server)[0], signal.SIGKILL)
    wait_for(
        lambda: (
            sum(values_of(server, "engine_restarts_total").values()) == num_restarts + 1
            and server.get("/ready").json().get("engines_ready") == 2
        ),
        3 * PATIENCE_S,
    )
    is_over.set()
    for thread in threads:
        thread.join()
    for number, answers in enumerate(results):
        assert set(answers) - {None} == {expected[number]}
    lost = sum(answer is None for answers in results for answer in answers)
    assert 1 <= lost < sum(map(len, results)) / 2
    wait_for(lambda: set(values_of(server, "num_requests_running").values()) == {0})
    wait_for(lambda: set(values_of(server, "kv_cache_usage_perc").values()) == {0})
    check_alive(server)


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_a_signal_lets_requests_finish_and_ends_every_process(server):
    """The last test of this server."""
    calls = [Call(server, letter) for letter in "ab"]
    wait_for(lambda: set(values_of(server, "num_requests_running").values()) == {1})
    children = children_of(server.process.pid)
    assert server.stop() == 0
    for call in calls:
        call.join()
        assert call.response.json()["usage"]["completion_tokens"] == 1900
    wait_for(lambda: not any(map(is_running, children)))


@pytest.mark.multigpu
def test_each_engine_has_a_gpu_of_its_own(tiny, log_path):
    """Memory of two GPUs is in use, by one process each; one that is killed gets its GPU again."""

    def gpus():
        query = ("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
        lines = subprocess.check_output(["nvidia-smi", *query], text=True).splitlines()
        mine = set(map(str, processes_of(server)))
        return sorted(gpu for gpu, pid in (line.split(", ") for line in lines) if pid in mine)

    few = ("--max-model-len", 2048, "--max-num-seqs", 4, "--gpu-memory-utilization", 0.1)
    with start_server(tiny, "--replicas", 2, *few, log_path=log_path) as server:
        before = values_of(server, "generation_tokens_total")
        calls = [Call(server, letter) for letter in "abcd"]
        for call in calls:
            call.join()
            assert call.response.status_code == 200
        after = values_of(server, "generation_tokens_total")
        assert all(after[engine] > before[engine] for engine in "01")
        found = gpus()
        if found:  # a container may hide the numbers of processes
            assert len(found) == len(set(found)) == 2
        os.kill(processes_of(server)[1], signal.SIGKILL)
        check_alive(server)
        wait_for(lambda: server.get("/ready").json().get("engines_ready") == 2, 3 * PATIENCE_S)
        assert gpus() == found
        check_alive(server)


@pytest.mark.slow
def test_each_engine_has_ranks_of_its_own(tiny, log_path):
    with start_server(tiny, *TWO, "-tp", 2, log_path=log_path, env=CPU_RANKS) as server:
        assert len(processes_of(server)) == 4
        os.kill(processes_of(server)[-1], signal.SIGKILL)
        for _ in range(3):
            check_alive(server)
        wait_for(lambda: server.get("/ready").json().get("engines_ready") == 2, 3 * PATIENCE_S)
        assert len(processes_of(server)) == 4
        check_alive(server)


@pytest.mark.parametrize("number", ["0", "-1", "65", "two", "1.5"])
def test_a_wrong_number_is_one_line(number, here):
    line = error_line(here("serve", "missing.gguf", "--replicas", number), status=2)
    assert "--replicas" in line


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF")
    process = tiercel("serve", path, "--port", "0", "--replicas", "2")
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("error: broken.gguf: the file has 4 bytes")
    assert "Traceback" not in process.stderr
