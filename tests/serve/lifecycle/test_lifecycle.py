"""The server as a process: start, states, restart, drain and kill."""

import contextlib
import functools
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.cli.harness import COMMAND, environment, error_line, tiercel
from tests.patience import PATIENCE_S, wait_for
from tests.serve.harness import (
    NAME,
    START_SECONDS,
    check_alive,
    children_of,
    is_answering,
    is_running,
    spawn,
    start_server,
)
from tiercel.cli.serve_options import LimitOptions
from tiercel.errors import ArgumentError
from tiercel.params import LIMITS
from tiercel.serve.server import bind_unix

pytestmark = pytest.mark.reliability

STREAM = {
    "model": NAME, "prompt": "the thin man", "max_tokens": 60, "temperature": 0,
    "ignore_eos": True, "stream": True,
}  # fmt: skip
FAULTS = ("--enable-fault-injection",)


@pytest.fixture(scope="module")
def doomed(tiny, tmp_path_factory):
    """A server whose engine is killed, and then itself."""
    with start_server(tiny, log_path=tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


class Reader(threading.Thread):
    """Reads a streamed answer in a thread of its own."""

    def __init__(self, server, body=STREAM):
        super().__init__()
        self.server, self.body = server, body
        self.text, self.error = "", None
        self.has_begun = threading.Event()
        self.start()
        assert self.has_begun.wait(PATIENCE_S)

    def run(self):
        try:
            with httpx.stream(
                "POST", f"{self.server.url}/v1/completions", json=self.body, timeout=2 * PATIENCE_S
            ) as response:
                for line in response.iter_lines():
                    self.text += line + "\n"
                    self.has_begun.set()
        except httpx.HTTPError as error:
            self.error = error
        self.has_begun.set()


def test_the_server_imports_no_torch():
    code = (
        "import sys\n"
        "import tiercel.cli.serve, tiercel.ipc.client, tiercel.serve.server\n"
        "print(sorted({'torch', 'triton', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_running_server_has_no_torch_mapped(server):
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "httptools" in maps
    assert "libtorch" not in maps


def test_the_session_server_is_alive(server):
    check_alive(server)


def test_states_while_loading_and_ready(tiny, log_path):
    env = {"TIERCEL_FAULTS": "sleep:1.5@start"}
    started = time.monotonic()
    with start_server(tiny, *FAULTS, log_path=log_path, is_ready=False, env=env) as server:
        wait_for(lambda: is_answering(server))
        assert server.get("/health").json() == {"status": "ok"}
        ready = server.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "loading")
        assert int(ready.headers["retry-after"]) >= 1
        refused = server.post("/v1/completions", STREAM)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_loading"
        told = []
        while (answer := server.get("/ready")).status_code != 200:
            told.append(answer.json()["progress"])
            assert time.monotonic() - started < START_SECONDS
            time.sleep(0.01)
        assert time.monotonic() - started > 1.5
        assert answer.json() == {"status": "ready"}
        assert told == sorted(told)
        assert told[0] < 0.5 < told[-1] <= 1
        line = next(line for line in server.log.splitlines() if line.endswith(" ready"))
        assert f"url={server.url} model={NAME} context_tokens=2048 kv_cache_tokens=" in line
        assert f"try: curl {server.url}/v1/chat/completions" in server.log


def test_the_log_names_each_stage_once(doomed):
    lines = re.findall(r"INFO serve stage=(\S+|\".*?\") starting$", doomed.log, re.MULTILINE)
    assert lines == [
        '"Loading PyTorch"', "Loading", '"Warming up"', "Rehearsing", '"Rehearsing requests"'
    ]  # fmt: skip
    assert "throughput" not in doomed.log.partition(" ready\n")[0]
    assert "\r" not in doomed.log


def test_a_terminal_has_one_line_that_is_rewritten(tiny):
    ours, theirs = pty.openpty()
    environ = environment(OMP_NUM_THREADS="1", TERM="xterm")
    environ.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [*COMMAND, "serve", str(tiny), "--port", "0"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, env=environ,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        with contextlib.suppress(OSError):  # its end closes the terminal
            while b"try: curl" not in shown:
                shown += os.read(ours, 1 << 16)
    finally:
        process.terminate()
        process.stdout.close()
        process.wait(PATIENCE_S)
        os.close(ours)
    lines = shown.decode().split("\r\n")
    assert "\r\x1b[KLoading PyTorch ..." in lines[0]
    assert "\r\x1b[KRehearsing requests 100%\r\x1b[K20" in lines[0]
    assert lines[0].endswith(" ready")
    assert "\r" not in "".join(lines[1:])
    assert "starting" not in shown.decode()


def test_states_while_the_engine_restarts(doomed):
    engine = server_engine(doomed)
    reader = Reader(doomed, STREAM | {"max_tokens": 1500})
    os.kill(engine, signal.SIGKILL)
    reader.join(PATIENCE_S)  # its death ends the stream, long before the watchdog would
    assert "[DONE]" not in reader.text
    error = json.loads(reader.text.strip().rpartition("data: ")[2])["error"]
    assert error["code"] == "engine_restarting"
    wait_for(lambda: "it was ended by signal SIGKILL" in doomed.log)
    states = set()
    while (answer := doomed.get("/ready")).status_code != 200:
        states.add(answer.json()["status"])
        assert doomed.get("/health").status_code == 200
        refused = doomed.post("/v1/completions", {**STREAM, "stream": False})
        assert refused.status_code in (200, 503)
        time.sleep(0.05)
    assert states == {"restarting"}
    check_alive(doomed)
    assert 'engine_restarts_total{engine="0",model_name="tiny"} 1.0' in doomed.get("/metrics").text
    assert server_engine(doomed) != engine


@pytest.mark.slow
def test_open_requests_hear_within_a_second_that_their_engine_is_gone(tiny, log_path):
    """On a machine with nothing else to do."""
    with start_server(tiny, log_path=log_path) as server:
        for _ in range(3):
            server.wait_ready()
            readers = [Reader(server, STREAM | {"max_tokens": 2000}) for _ in range(4)]
            killed = time.monotonic()
            os.kill(server_engine(server), signal.SIGKILL)
            for reader in readers:
                reader.join(PATIENCE_S)
            assert time.monotonic() - killed < 1
            assert all("engine_restarting" in reader.text for reader in readers)


@pytest.mark.slow
def test_health_answers_within_a_second(server):
    """Promise P1, on a machine with nothing else to do."""
    readers = [Reader(server) for _ in range(4)]
    for _ in range(20):
        assert httpx.get(f"{server.url}/health", timeout=1).status_code == 200
    for reader in readers:
        reader.join(PATIENCE_S)


def server_engine(server):
    """Process id of the engine: the child that has PyTorch mapped."""
    for pid in children_of(server.process.pid):
        with contextlib.suppress(OSError):
            if "libtorch" in Path(f"/proc/{pid}/maps").read_text():
                return pid
    raise AssertionError("no engine process")


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_drains(tiny, log_path, signum):
    """A stream goes on, a new connection is refused, one that was open hears 503; then status 0."""
    env = {"TIERCEL_FAULTS": "sleep:4@5"}
    with (
        start_server(tiny, *FAULTS, log_path=log_path, env=env, is_probed=False) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        http.get("/health")  # keeps its connection
        reader = Reader(server)
        server.process.send_signal(signum)
        wait_for(lambda: not accepts(server.port))
        ready = http.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        refused = http.post("/v1/completions", json=STREAM)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        reader.join(PATIENCE_S)
        assert reader.text.rstrip().endswith("data: [DONE]")
        assert '"finish_reason":"length"' in reader.text
        assert server.process.wait(PATIENCE_S) == 0
        assert "Traceback" not in server.log


def test_a_signal_while_loading_ends_in_0(tiny, log_path):
    env = {"TIERCEL_FAULTS": "sleep:90@start"}
    process, url = spawn(tiny, "--port", 0, *FAULTS, log_path=log_path, env=env)
    process.stdout.close()
    wait_for(lambda: accepts(int(url.rpartition(":")[2])))
    wait_for(lambda: children_of(process.pid))
    children = children_of(process.pid)
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    assert "Traceback" not in log_path.read_text()
    wait_for(lambda: not any(map(is_running, children)))


def accepts(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), PATIENCE_S):
        return True
    return False


def test_draining_ends_what_takes_too_long(tiny, log_path):
    env = {"TIERCEL_FAULTS": "sleep:60@5"}
    with start_server(
        tiny, "--drain-seconds", 0.5, *FAULTS, log_path=log_path, env=env, is_probed=False
    ) as server:
        reader = Reader(server)
        children = children_of(server.process.pid)
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started > 0.5
        reader.join(PATIENCE_S)
        assert "[DONE]" not in reader.text
        assert '"code":"draining"' in reader.text
        wait_for(lambda: not any(map(is_running, children)))


@pytest.mark.slow
def test_the_second_signal_ends_at_once(tiny, log_path):
    env = {"TIERCEL_FAULTS": "sleep:60@5"}
    with start_server(tiny, *FAULTS, log_path=log_path, env=env, is_probed=False) as server:
        Reader(server)
        children = children_of(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not accepts(server.port))
        started = time.monotonic()
        assert server.stop(signal.SIGTERM, seconds=5) == 128 + signal.SIGTERM
        assert time.monotonic() - started < 1
        wait_for(lambda: not any(map(is_running, children)))


def test_sigkill_leaves_nothing_behind(doomed, tiny, log_path):
    Reader(doomed, STREAM | {"max_tokens": 1500})
    children = children_of(doomed.process.pid)
    assert len(children) >= 2  # the engine and a template process
    doomed.process.kill()
    doomed.process.wait(PATIENCE_S)
    wait_for(lambda: not any(map(is_running, children)))
    process, url = spawn(tiny, "--port", doomed.port, log_path=log_path)
    try:
        assert url.endswith(f":{doomed.port}")
        wait_for(lambda: accepts(doomed.port))
    finally:
        process.kill()
        process.stdout.close()
        process.wait(PATIENCE_S)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="one rank"),
        pytest.param(("-tp", 2), id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_a_taken_port_fails_at_once(arguments):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = error_line(tiercel("serve", "missing.gguf", *arguments, "--port", port))
    assert f"127.0.0.1:{port}: Address already in use. Choose another with --port" in line


WRONG = {
    "bad host": (["--host", "no.such.host.invalid", "--no-key"], 1, "--host no.such.host.inv"),
    "foreign address": (["--host", "192.0.2.1", "--no-key"], 1, "192.0.2.1:8000: "),
    "no key": (
        ["--host", "0.0.0.0"],
        2,
        "there is no key. Set TIERCEL_API_KEY or --api-key-file, ",
    ),
    "key and none": (["--no-key", "--api-key", "x"], 2, "--no-key is given, and a key too."),
    "socket and port": (
        ["--uds", "x.sock", "--port", "8000"],
        2,
        "--port 8000 cannot be used with",
    ),
    "socket and host": (["--uds", "x.sock", "--host", "::1"], 2, "--host ::1 cannot be used with"),
    "port": (["--port", "70000"], 2, "--port 70000 is out of range"),
    "no key file": (["--api-key-file", "missing.txt"], 1, "missing.txt: No such file"),
    "empty key": (["--api-key", ""], 2, "a key is empty"),
    "key with a line break": (["--api-key", "a\nb"], 2, "no header can"),
    "key that is no ASCII": (["--api-key", "schlüssel"], 2, "no header can"),
    "no config": (["--config", "missing.toml"], 2, "missing.toml: the configuration file"),
    "limit": (["--max-body-bytes", "0"], 2, "--max-body-bytes 0 is out of range"),
    "limit over the ceiling": (["--max-n", "17"], 2, "--max-n 17 is out of range. Use 1 to 16"),
    "drain": (["--drain-seconds", "-1"], 2, "--drain-seconds"),
    "hang": (["--hang-seconds", "0.5"], 2, "--hang-seconds 0.5 is out of range. Use 1 or more"),
    "temperature": (["--temperature", "3"], 2, "temperature=3.0 is out of range"),
    "origin": (["--cors-origin", "example.org"], 2, "--cors-origin example.org: no origin"),
    "prefix": (["--metrics-prefix", "a:b"], 2, "--metrics-prefix"),
    "folder of the socket": (["--uds", "/nowhere/x.sock"], 1, "--uds /nowhere/x.sock: No such"),
    "tool parser": (["--tool-parser", "x"], 2, "tool_parser='x' is unknown. Use none, "),
    "reasoning parser": (["--reasoning-parser", "x"], 2, "reasoning_parser='x' is unknown."),
    "option": (["--max-conections", "3"], 2, "--max-connections"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_one_line_before_anything_loads(name, capsys, monkeypatch, tmp_path):
    from tiercel.cli.main import run

    arguments, status, words = WRONG[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tiercel.serve.server.run_server", None)
    assert run(["serve", "missing.gguf", *arguments]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_how_long_an_engine_may_hang_is_an_option(monkeypatch):
    from tiercel.cli.main import run

    limits = []

    def run_server(state, _sockets, _drain_seconds):
        limits.append(state.client._supervisor._watchdog.limit_s)
        return 0

    monkeypatch.setattr("tiercel.serve.server.run_server", run_server)
    for arguments in ([], ["--hang-seconds", "7.5"]):
        assert run(["serve", "missing.gguf", "--port", "0", *arguments]) == 0
    assert limits == [60.0, 7.5]


@pytest.mark.parametrize("content", [b"", b"\n# only\n\n", b"\xff\xfe", b"a\x01b\n"])
def test_bad_key_files(content, capsys, tmp_path):
    from tiercel.cli.main import run

    path = tmp_path / "keys"
    path.write_bytes(content)
    assert run(["serve", "missing.gguf", "--api-key-file", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: ")


def test_every_limit_has_an_option_with_the_same_default():
    options = {name: getattr(LimitOptions(), name) for name in LimitOptions.__dataclass_fields__}
    fixed = {"max_temperature", "max_tokens", "max_prompt_bytes_per_token"}
    assert options == {
        name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__ if name not in fixed
    }


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not a model" * 10, "magic"),
        pytest.param(None, "the path does not exist", marks=pytest.mark.slow),
    ],
)
def test_a_bad_model_ends_the_server_with_one_error(content, words, tmp_path, log_path):
    path = tmp_path / "bad.gguf"
    if content is not None:
        path.write_bytes(content)
    process, url = spawn(path, "--port", 0, "--log-level", "error", log_path=log_path)
    assert process.wait(2 * PATIENCE_S) == 1
    process.stdout.close()
    assert url.startswith("http://127.0.0.1:")
    errors = [line for line in log_path.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert words in errors[0]
    assert "Traceback" not in log_path.read_text()


def test_a_template_with_a_syntax_error_ends_the_server(tmp_path, log_path):
    from tests.gguf_files import tiny_model

    template = "{{ a }}\n{% if %}"
    path = tiny_model(tmp_path / "t.gguf", metadata={"tokenizer.chat_template": template})
    process, _ = spawn(path, "--port", 0, log_path=log_path)
    assert process.wait(2 * PATIENCE_S) == 1
    process.stdout.close()
    (line,) = [line for line in log_path.read_text().splitlines() if line.startswith("error: ")]
    assert "t.gguf: the chat template has a syntax error in line 2" in line


@pytest.mark.slow
def test_an_engine_that_never_starts_ends_in_70(tiny, log_path):
    env = {"TIERCEL_FAULTS": "exit@start"}
    process, url = spawn(tiny, "--port", 0, *FAULTS, log_path=log_path, env=env)
    assert process.wait(180) == 70
    process.stdout.close()
    assert url
    given_up = "the engine is given up after 1 restart: it ended with status 3"
    assert given_up in log_path.read_text()


def test_a_request_that_ends_two_engines_is_not_repeated_by_clients(tiny, log_path):
    env = {"TIERCEL_FAULTS": "exit@5"}  # in each engine
    sent = []
    with start_server(tiny, *FAULTS, log_path=log_path, env=env, is_probed=False) as server:
        first = server.post("/v1/completions", STREAM | {"stream": False})
        assert (first.status_code, first.json()["error"]["code"]) == (503, "engine_restarting")
        assert "x-should-retry" not in first.headers
        server.wait_ready()
        with (
            httpx.Client(event_hooks={"request": [sent.append]}) as http,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", http_client=http) as client,
            pytest.raises(openai.InternalServerError) as caught,
        ):
            client.completions.create(
                model=NAME, prompt="the thin man", max_tokens=60, temperature=0,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
        assert len(sent) == 1, "the client does not send it again"
        assert caught.value.status_code == 500
        assert caught.value.code == "engine_died_twice"
        assert "for the second time. Do not send it again unchanged" in str(caught.value)
        lines = [line for line in server.log.splitlines() if "last step" in line]
        ids = [first.headers["x-request-id"], caught.value.response.headers["x-request-id"]]
        assert [line.rpartition(": ")[2] for line in lines] == [*ids, ids[1]]
        assert all(name.startswith("req_") for name in ids)
        assert "Traceback" not in server.log


@pytest.mark.parametrize("is_valid", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_file_that_changed_ends_the_server_with_one_line(
    is_valid, tiny, tmp_path, log_path
):
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny.read_bytes())
    with start_server(path, log_path=log_path, is_probed=False) as server:
        reader = Reader(server, STREAM | {"max_tokens": 2000})
        if is_valid:
            path.write_bytes(tiny.read_bytes())
        else:
            os.truncate(path, 1000)
        # As under a truncated mapping: the embedding is read there, so the engine may have met it.
        with contextlib.suppress(AssertionError, ProcessLookupError):
            os.kill(server_engine(server), signal.SIGBUS)
        reader.join(PATIENCE_S)
        error = json.loads(reader.text.strip().rpartition("data: ")[2])["error"]
        assert error["code"] == "engine_dead"
        assert "m.gguf changed since the start: " in error["message"]
        assert server.process.wait(PATIENCE_S) == 70
        lines = [line for line in server.log.splitlines() if "m.gguf changed" in line]
        assert len(lines) == 1
        given_up = "the engine is given up after 0 restarts: it was ended by signal SIGBUS, and m.g"
        assert given_up in lines[0]
        assert "Traceback" not in server.log


def test_faults_are_off_by_default(tiny, log_path):
    process, _ = spawn(tiny, "--port", 0, log_path=log_path, env={"TIERCEL_FAULTS": "exit@9"})
    assert process.wait(2 * PATIENCE_S) == 1
    process.stdout.close()
    assert "TIERCEL_FAULTS" in log_path.read_text()


def test_a_warning_beyond_loopback_without_a_key(tiny, log_path):
    for key, expected in (None, True), ("secret-key-1", False):
        arguments = ["--host", "0.0.0.0"] + (["--no-key"] if key is None else ["--api-key", key])
        process, url = spawn(tiny, "--port", 0, *arguments, log_path=log_path)
        assert url.startswith("http://0.0.0.0:")
        port = int(url.rpartition(":")[2])
        wait_for(functools.partial(accepts, port))
        process.kill()
        process.stdout.close()
        process.wait(PATIENCE_S)
        assert ("there is no key" in log_path.read_text()) is expected
        assert "secret-key-1" not in log_path.read_text()


def test_keys_metrics_and_json_logs(tiny, log_path, tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("# users\nfirst-key\n\nsecond-key\n")
    arguments = ["--api-key-file", keys, "--log-format", "json", "--metrics-auth", "key"]
    env = {"TIERCEL_API_KEY": "third-key"}
    with start_server(tiny, *arguments, log_path=log_path, key="second-key", env=env) as server:
        check_alive(server)
        for key in ("first-key", "second-key", "third-key"):
            headers = {"x-api-key": key}
            assert httpx.get(f"{server.url}/metrics", headers=headers).status_code == 200
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200
        evil = {**server.headers, "host": "evil.example"}
        assert httpx.get(f"{server.url}/v1/models", headers=evil).status_code == 403
    lines = [json.loads(line) for line in log_path.read_text().splitlines()]
    line = next(line for line in lines if line.get("path") == "/v1/completions")
    assert line["status"] == 200
    assert line["prompt_tokens"] > 0
    assert line["completion_tokens"] == 8
    assert line["finish_reason"] == "length"
    assert line["total_ms"] > 0
    assert not [key for key in ("first-key", "second-key", "third-key") if key in str(lines)]
    assert "the thin man" not in str(lines)


def test_a_unix_socket(tiny, log_path, tmp_path):
    path = tmp_path / "t.sock"
    for signum in (signal.SIGKILL, signal.SIGTERM):  # the second finds what the first left behind
        process, url = spawn(tiny, "--uds", path, log_path=log_path)
        assert url == f"http+unix://{path}"
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost") as http:
            wait_for(lambda: is_answering(http))
        with pytest.raises(ArgumentError, match=f"--uds {path}: "):
            bind_unix(path)
        process.send_signal(signum)
        process.stdout.close()
        assert process.wait(PATIENCE_S) == (0 if signum is signal.SIGTERM else -signum)
        assert path.exists() is (signum is signal.SIGKILL)
