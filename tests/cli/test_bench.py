"""`tiercel bench` as a user runs it: tables, files, usage errors, Ctrl-C, and offline runs."""

import importlib.util
import json
import os
import pty
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.bench.stand_in import StandIn
from tests.cli.harness import COMMAND, environment
from tests.dsv4_files import TINY as TINY_V4
from tests.gguf_files import tiny_model
from tests.loopback import served
from tests.patience import PATIENCE_S, wait_for
from tiercel.bench import environment as bench_environment
from tiercel.cli.main import run
from tiercel.profiling import device_timing
from tiercel.profiling.device_timing import Ceilings

SHORT = ["--input-len", "8", "--output-len", "3", "--requests", "6", "--warm-up", "1"]


@pytest.fixture(scope="module")
def server():
    stand_in = StandIn()
    with served(stand_in) as stand_in.address:
        yield stand_in


@pytest.fixture(autouse=True)
def _no_options_from_outside(monkeypatch, server):
    for name in [name for name in os.environ if name.startswith("TIERCEL_")]:
        monkeypatch.delenv(name)
    server.first_s = 0.0
    server.bodies.clear()


def serve(server, *arguments):
    return run(["bench", "serve", server.address, *SHORT, *map(str, arguments)])


def test_table_to_stdout_and_everything_to_json(server, tmp_path, capsys):
    path = tmp_path / "r.json"
    assert serve(server, "--concurrency", "1,2", "--rate", 100, "--json", path) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0] == "nobody 1.5: stand-in"
    assert re.split(r"  +", lines[1])[1:] == ["1 at once", "2 at once", "100/s"]
    cells = {line[:22].strip(): line[22:].split() for line in lines[2:] if line}
    assert cells["answers"] == ["6", "6", "6"]
    assert cells["errors"] == ["0", "0", "0"]
    report = json.loads(path.read_text())
    assert report["kind"] == "serve"
    assert report["model"] == "stand-in"
    assert {"python", "tiercel", "httptools"} <= report["versions"].keys()
    assert report["hardware"]["cpu"]
    assert report["workload"]["seed"] == 0
    assert [len(level["samples"]) for level in report["levels"]] == [6, 6, 6]
    assert report["levels"][0]["summary"]["prompt_tokens"] == 48
    assert report["levels"][0]["summary"]["completion_tokens"] == 18


def test_compare_and_plot(server, tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for file, label in zip(files, ("old", "new"), strict=True):
        assert serve(server, "--json", file, "--label", label) == 0
    capsys.readouterr()
    plot = tmp_path / "c.svg"
    assert run(["bench", "serve", "--compare", *files, "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["1 at once", f"{'':22}" + lines[1][22:]]
    assert lines[1].split() == ["old", "new", "ratio"]
    assert "new p99" in plot.read_text()
    assert serve(server, "--json", files[1], "--seed", 1) == 0
    capsys.readouterr()
    assert run(["bench", "throughput", "--compare", *files]) == 1
    assert "different shapes: seed is 0 and 1." in capsys.readouterr().err


def test_a_file_of_prompts(server, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine words", "max_tokens": 2}\n{"prompt": "429"}\n')
    assert serve(server, "--file", path, "--json", tmp_path / "r.json") == 0
    captured = capsys.readouterr()
    assert captured.err == "1 at once: 3 requests failed: http_429: 429 it is.\n"
    report = json.loads((tmp_path / "r.json").read_text())
    assert len(report["workload"]["file_sha256"]) == 64
    assert report["workload"]["input_len"] is None


def test_a_table_of_rich_on_a_terminal(server):
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "bench", "serve", server.address, *SHORT],
        stdout=follower,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=environment(TERM="xterm"),
    ) as process:
        os.close(follower)
        shown = b""
        while True:
            try:
                data = os.read(leader, 65536)
            except OSError:
                break
            shown += data
        os.close(leader)
        assert process.wait(60) == 0, process.stderr.read()
    assert "─" in shown.decode()
    assert "end to end p90, ms" in shown.decode()  # there is no inter-token in a single chunk


def test_ctrl_c_ends_with_what_has_come(server, tmp_path):
    server.first_s = 0.1
    path = tmp_path / "r.json"
    arguments = ["--concurrency", "2", "--requests", "10000", "--warm-up", "0", "--input-len", "8"]
    with subprocess.Popen(
        [*COMMAND, "bench", "serve", server.address, *arguments, "--json", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        wait_for(lambda: len(server.bodies) >= 6)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, error
    assert "answers" in output
    assert error.splitlines()[-1] == "Interrupted: the result is partial."
    report = json.loads(path.read_text())
    assert report["is_partial"]
    assert report["levels"][0]["summary"]["ok"] >= 1
    assert report["levels"][0]["summary"]["unfinished"] in (1, 2)  # one may just have ended


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, "URL: none was given"),
        (["nonsense"], 1, "'nonsense' is not the URL of a server"),
        (["http://127.0.0.1:9"], 1, "http://127.0.0.1:9/v1/models: connect: "),
        (["URL", "--concurrency", "0"], 2, "not a list of counts"),
        (["URL", "--concurrency", "1,,2"], 2, "not a list of counts"),
        (["URL", "--rate", "x"], 2, "not a list of requests per second"),
        (["URL", "--rate", "nan"], 2, "not a list of requests per second"),
        (["URL", "--input-len", "0"], 2, "--input-len: '0' is out of range"),
        (["URL", "--token-ids", "9:1"], 2, "--token-ids: '9:1' is out of range"),
        (["URL", "--requests", "0"], 2, "--requests 0 is out of range"),
        (["URL", "--warm-up", "-1"], 2, "--warm-up -1 is out of range"),
        (["URL", "--temperature", "3"], 2, "--temperature 3.0 is out of range"),
        (["URL", "--timeout", "0"], 2, "--timeout 0.0 is out of range"),
        (["URL", "--goodput", "first"], 2, "not a list of bounds in milliseconds"),
        (["URL", "--goodput", "first=0"], 2, "not a list of bounds in milliseconds"),
        (["URL", "--goodput", "last=1"], 2, "not a list of bounds in milliseconds"),
        (["URL", "--plot", "a.jpg"], 2, "the ending is unknown"),
        (["URL", "--file", "missing.jsonl"], 1, "missing.jsonl: No such file"),
        (["URL", "--served-model-name", "gone"], 1, "has no model 'gone'"),
        (["URL", "--api-key", "wrong"], 1, "answered HTTP 401"),
        (["--compare", "missing.json", "b.json"], 1, "missing.json: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_failures_are_one_line(server, arguments, status, words, capsys):
    arguments = [server.address if text == "URL" else text for text in arguments]
    assert run(["bench", "serve", *arguments]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_goodput_is_counted(server, capsys):
    assert serve(server, "--goodput", "first=5000,latency=9000") == 0
    assert "goodput, requests/s" in capsys.readouterr().out


def test_missing_matplotlib_is_named_before_anything_is_measured(server, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    assert serve(server, "--plot", "a.svg") == 2
    assert "pip install 'tiercel[bench]'" in capsys.readouterr().err
    assert not server.bodies


def test_measuring_a_server_imports_no_torch(server):
    code = (
        "import sys\n"
        "from tiercel.cli.main import run\n"
        f"run({['bench', 'serve', server.address, *SHORT]!r})\n"
        "print(sorted({'torch', 'matplotlib', 'httpx', 'transformers'} & set(sys.modules)))"
    )
    process = subprocess.run(
        [*COMMAND[:1], "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert process.stdout.splitlines()[-1] == "[]"


def test_options_from_a_file(server, tmp_path, monkeypatch, capsys):
    config = tmp_path / "c.toml"
    config.write_text("seed = 3\n[bench.serve]\nconcurrency = '2'\n[bench.throughput]\nseed = 4\n")
    assert serve(server, "--config", config, "--json", tmp_path / "r.json") == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["workload"]["seed"] == 3
    assert report["levels"][0]["load"]["concurrency"] == 2
    for text, words in (
        (
            "[bench.serv]\nseed = 1\n",
            "'bench serv' is not an option of the command line. Did you mean",
        ),
        ("[bench]\nseed = 1\n", "'bench' is not an option"),
        ("[bench.serve]\nsede = 1\n", "'bench serve.sede' is not an option"),
    ):
        capsys.readouterr()
        config.write_text(text)
        assert serve(server, "--config", config) == 2
        assert words in capsys.readouterr().err


def test_the_command_line_is_kept_without_secrets_and_folders():
    arguments = ["/usr/bin/tiercel", "bench", "serve", "http://h", "--api-key", "k1"]
    arguments += ["--api-key=k2", "--json", "/home/someone/out.json", "--label", "two words"]
    shown = bench_environment.command_line(arguments)
    assert shown.endswith(
        "bench serve http://h --api-key ... --api-key=... --json out.json --label 'two words'"
    )
    assert "k1" not in shown
    assert "k2" not in shown
    assert "someone" not in shown


def test_hardware_without_a_driver(monkeypatch):
    def run_nothing(*_args, **_kwargs):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(bench_environment.subprocess, "run", run_nothing)
    assert set(bench_environment.hardware()) == {"cpu", "cores", "native_library"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


OFFLINE = ["--input-len", "4:8", "--output-len", "3", "--requests", "5", "--token-ids", "3:20"]


def test_offline(model, tmp_path, capsys):
    path = tmp_path / "r.json"
    command = ["bench", "throughput", "-m", str(model), *OFFLINE, "--json", str(path)]
    assert run([*command, "--concurrency", "1,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("offline: tiny.gguf")
    assert re.split(r"  +", lines[1])[1:] == ["1 at once", "2 at once"]
    report = json.loads(path.read_text())
    assert report["kind"] == "throughput"
    assert len(report["model_sha256"]) == 64
    for level in report["levels"]:
        assert level["summary"]["ok"] == 5
        assert level["summary"]["completion_tokens"] == 15
        assert level["summary"]["short"] == 0
        assert level["summary"]["gap"] is None
        assert 0 < level["summary"]["first_token"]["p50"] <= level["summary"]["latency"]["p50"]
        assert all(4 <= sample["prompt_tokens"] <= 8 for sample in level["samples"])


def test_offline_asks_the_requests_of_the_server(server, model, tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("serve.json", "offline.json")]
    offline = ["bench", "throughput", "-m", str(model), *OFFLINE, "--concurrency", "2"]
    assert run([*offline, "--json", files[1]]) == 0
    arguments = [*OFFLINE, "--concurrency", "2", "--json", files[0]]
    assert run(["bench", "serve", server.address, *arguments]) == 0
    capsys.readouterr()
    assert run(["bench", "serve", "--compare", *files]) == 0
    assert "output tokens/s" in capsys.readouterr().out
    a, b = (json.loads(Path(file).read_text())["levels"][0]["samples"] for file in files)
    key = "prompt_tokens"
    assert [sample[key] for sample in a] == [sample[key] for sample in b]


def test_offline_refuses_ids_that_the_model_lacks(model, capsys):
    assert run(["bench", "throughput", "-m", str(model)]) == 2
    error = capsys.readouterr().err
    assert "--token-ids 1000:30000: the model has" in error
    assert error.count("\n") == 1


def test_offline_interrupted_between_levels_keeps_the_first(model, tmp_path, monkeypatch, capsys):
    from tiercel.bench import throughput

    real, calls = throughput.measure_offline, []

    def measure(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(throughput, "measure_offline", measure)
    command = ["bench", "throughput", "-m", str(model), *OFFLINE, "--concurrency"]
    assert run([*command, "1,2"]) == 130
    captured = capsys.readouterr()
    assert "1 at once" in captured.out
    assert "2 at once" not in captured.out
    assert captured.err.endswith("Interrupted: the result is partial.\n")
    assert run([*command, "1,2"]) == 0


def test_speed_to_table_and_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TIERCEL_PREFIX_CACHE", "0")
    model, path = tmp_path / "tiny.gguf", tmp_path / "s.json"
    tiny_model(model)
    options = ["--prompt", "12", "--generate", "3", "--depth", "0,5", "--batch", "2"]
    options += ["--batch-prompt", "7", "--repeat", "2", "--device", "cpu"]
    assert run(["bench", "-m", str(model), *options, "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["tokens/s", "deviation", "floor", "of", "floor", "of", "d0"]
    names = ["pp12", "tg3 @ d0", "tg3 @ d5", "tg3 @ d7 b2"]
    assert [re.split(r"  +", line)[0] for line in lines[2:6]] == names
    report = json.loads(path.read_text())
    assert report["kind"] == "speed"
    assert report["switches"] == {"TIERCEL_PREFIX_CACHE": "0"}
    assert [len(result["rates"]) for result in report["results"]] == [2] * 4
    assert all(rate > 0 for result in report["results"] for rate in result["rates"])
    for result in report["results"]:
        assert result["ratio"] == pytest.approx(result["mean"] / result["floor"])
    assert report["cost"]["weight_bytes"] > 0
    assert report["read_gbps"] > 0


def test_deepseek_v4_has_lines_of_its_own(tmp_path, capsys):
    options = [
        "--generate",
        "2",
        "--repeat",
        "1",
        "--device",
        "cpu",
        "--json",
        f"{tmp_path}/s.json",
    ]
    options += ["--prompt", "40", "--batch", "2", "--batch-prompt", "30"]
    assert run(["bench", "-m", str(TINY_V4), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["pp40", "tg2 @ d1024", "tg2 @ d30 b2"]  # 32,768 are more than its context
    assert [re.split(r"  +", line)[0] for line in lines[2:5]] == names
    assert run(["bench", "-m", str(TINY_V4), *options, "--depth", "6,600"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("of d6")
    assert lines[3].endswith("100%")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "1,x"], "--prompt '1,x' is not a list of counts"),
        (["--depth", "-1"], "--depth '-1' is not a list of counts"),
        (["--generate", "-1"], "--generate -1 or --batch-prompt 512 is out of range"),
        (["--prompt", "0", "--generate", "0"], "there is nothing to measure"),
        (["--repetitions", "0"], "--repetitions 0 is out of range"),
    ],
)
@pytest.mark.parametrize("command", [["bench"], ["bench", "speed"]], ids=" ".join)
def test_wrong_speed_options(command, options, message, capsys):
    assert run([*command, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["speed", "kernels", "throughput"])
def test_a_file_that_cannot_be_written_is_found_before_the_measurement(command, tmp_path, capsys):
    assert run(["bench", command, "-m", "missing.gguf", "--json", str(tmp_path)]) == 2
    assert f"{tmp_path}: is a folder" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert run(["bench", command, "-m", "missing.gguf", "--plot", f"{tmp_path}/file/a.svg"]) == 1
    assert f"{tmp_path}/file: " in capsys.readouterr().err


def test_bench_suggests_its_commands(capsys):
    assert run(["bench", "sped"]) == 2
    assert 'Did you mean "speed"?' in capsys.readouterr().err


def test_kernels_to_table_and_files(tmp_path, capsys):
    model, path, plot = tmp_path / "tiny.gguf", tmp_path / "k.json", tmp_path / "k.svg"
    tiny_model(model)
    options = ["--tokens", "1,3", "--decode", "2x40", "--prompt", "20", "--seconds", "0.001"]
    options += ["--device", "cpu", "--json", str(path), "--plot", str(plot)]
    assert run(["bench", "kernels", "-m", str(model), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", lines[1].strip())[-1] == "of ceiling"
    report = json.loads(path.read_text())
    assert report["kind"] == "kernels"
    assert report["read_gbps"] > 0
    assert report["tflops"] > 0
    assert len(report["results"]) == 5 * 2 + 2 == len(lines[2:14])
    assert all(row["us"] > 0 and row["flops"] > 0 for row in report["results"])
    drawn = plot.read_text()
    assert all(row["name"] in drawn for row in report["results"])


@pytest.mark.parametrize("command", ["speed", "kernels"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--spec", "ngram"], "--spec ngram: single steps are measured without draft tokens."),
        (["--prompt", "600"], "tokens but tiny.gguf has 512. Measure shorter ones."),
    ],
)
def test_what_single_steps_cannot_measure(command, options, message, model, capsys):
    assert run(["bench", command, "-m", str(model), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("forked_engines")
def test_speed_of_several_ranks(tmp_path, monkeypatch):
    """The floor is that of all GPUs together."""
    monkeypatch.setenv("TIERCEL_CPU_RANKS", "1")
    monkeypatch.setattr(device_timing, "measure_ceilings", lambda *_: Ceilings(10.0, 0.1))
    model = tmp_path / "tiny.gguf"
    tiny_model(model, head_dim=32)
    options = ["--prompt", "0", "--generate", "2", "--repetitions", "1", "--device", "cpu"]
    floors = []
    for size in ("1", "2"):
        path = tmp_path / f"{size}.json"
        command = ["bench", "speed", "-m", str(model), *options, "--json", str(path), "-tp", size]
        assert run(command) == 0
        report = json.loads(path.read_text())
        (result,) = report["results"]
        assert result["rates"][0] > 0
        floors.append(result["floor"])
    assert floors[1] == pytest.approx(2 * floors[0])


def test_speed_is_drawn(tmp_path):
    model, plot = tmp_path / "tiny.gguf", tmp_path / "s.svg"
    tiny_model(model)
    options = ["--prompt", "0", "--generate", "2", "--repetitions", "1", "--device", "cpu"]
    assert run(["bench", "speed", "-m", str(model), *options, "--plot", str(plot)]) == 0
    assert "tg2 @ d0" in plot.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "1,x"], "--tokens '1,x' is not a list of counts"),
        (["--decode", "4096"], "--decode '4096' is not a list of requests x context"),
        (["--decode", "0x5"], "--decode '0x5' is not a list of requests x context"),
        (["--tokens", "0", "--decode", "0", "--prompt", "0"], "there is nothing to measure"),
        (["--seconds", "0"], "--seconds 0.0 is out of range"),
        (["--plot", "a.txt"], "--plot a.txt: the ending is unknown"),
    ],
)
def test_wrong_kernel_options(options, message, capsys):
    assert run(["bench", "kernels", *options]) == 2
    assert message in capsys.readouterr().err


def test_kernels_of_deepseek_v4_are_refused(capsys):
    """It names none, and an empty table would say nothing."""
    options = ["--decode", "1x100", "--device", "cpu"]
    assert run(["bench", "kernels", "-m", str(TINY_V4), *options]) == 1
    error = "error: kernels of deepseek4 are not timed one by one. Use bench speed.\n"
    assert capsys.readouterr() == ("", error)
