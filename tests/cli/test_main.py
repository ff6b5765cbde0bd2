"""The command line itself: help, version, usage errors, statuses, streams, sources of options."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

import tiercel as package
from tests.cli.harness import COMMAND, environment, error_line, tiercel
from tests.gguf_files import tiny_model
from tiercel.__main__ import main
from tiercel.cli.main import _COMMANDS, _EXAMPLES, _option_names, make_app, run

COMMANDS = [
    "generate",
    "chat",
    "serve",
    "score",
    "inspect",
    "pull",
    "convert",
    "bench",
    "bench serve",
    "bench throughput",
    "bench speed",
    "bench kernels",
    "doctor",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen_and_has_two_examples(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert run([*command.split(), "--help"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    assert len(lines) <= 47 or command == "serve"  # serve has a row for every limit
    assert max(map(len, lines)) <= 100
    examples = lines[lines.index("Examples:") + 1 :]
    assert examples == [f"  {line}" for line in _EXAMPLES[command or "tiercel"]]  # to be copied
    assert len(examples) == 2
    assert "\x1b" not in shown.out
    assert " object at 0x" not in shown.out


@pytest.mark.parametrize("command", sorted(_COMMANDS))
def test_help_shows_every_option_and_what_it_is(command, capsys):
    assert run([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    rows = re.findall(r"^  (?:\[\w+\], )?(?:-\w, )?(--.*?)  +(\S.*)$", text, re.MULTILINE)
    shown = {name for names, _ in rows for name in re.findall(r"--([\w-]+)", names)}
    known = _option_names(make_app(), command)
    negatives = {f"{word}-{name}" for word in ("no", "empty") for name in known}
    assert shown == known - negatives - {"verbose", "quiet"}
    assert "--config PATH, -v and -q" in text


def test_help_explains_the_options_of_every_command_once(capsys):
    assert run(["--help"]) == 0
    rows = re.findall(r"^  (?:-\w, )?--(\w+)(?: PATH)?  +\w", capsys.readouterr().out, re.MULTILINE)
    assert set(rows) == {"config", "verbose", "quiet"}


def test_help_and_wrong_use_import_nothing_heavy():
    code = (
        "import sys\n"
        "from tiercel.cli.main import run\n"
        "for arguments in (['--help'], ['--version'], ['generate', '--help'], ['nonsense']):\n"
        "    run(arguments)\n"
        "print(sorted({'torch', 'numpy', 'tokenizers', 'triton', 'jinja2'} & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert process.stdout.splitlines()[-1] == "[]"


def test_a_command_imports_none_of_the_others():
    code = (
        "import sys\n"
        "from tiercel.cli.main import _parse\n"
        "_parse(['generate', 'Hello'])\n"
        "others = {'tiercel.cli.chat', 'tiercel.cli.serve_options', 'rich.console', 'asyncio'}\n"
        "print(sorted(others & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert process.stdout.splitlines()[-1] == "[]"


def test_version():
    lines = tiercel("--version").stdout.splitlines()
    assert lines[0] == f"tiercel {package.__version__}"
    assert lines[1].startswith("torch 2.")
    assert lines[2].startswith("CUDA ")


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "tiercel", "--version"]
    process = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
    assert process.stdout == tiercel("--version").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generat"], 'unknown command "generat". Did you mean "generate"?'),
        (["generate", "x", "--temprature", "1"], "--temprature. Did you mean --temperature?"),
        (["generate", "x", "--max-tokens", "many"], "unable to convert"),
        (["generate", "x", "--max-tokens"], "--max-tokens"),
        (["generate", "x", "--max-tokens", "2.5"], "--max-tokens: '2.5' is not a whole number."),
        (["generate", "x", "--device", "gpu"], "use auto, cpu, cuda or cuda:N"),
        (["generate", "x", "--dtype", "int8"], "float32"),
        (["serve", "--kv-dtype", "int8"], "bf16"),
        (["bench", "throughput", "--numerics", "fast"], "native"),
        (["generate", "x", "--temp", "0"], "--temp. Did you mean --temperature? See"),
        (["generate", "x", "--max=3"], "--max. Did you mean --max-model-len or --max-tokens?"),
        (["generate", "x", "--cpu"], "unknown option: --cpu. See tiercel generate --help."),
        (["generate", "x", "--", "--seed", "1"], "--seed follows '--', after which all is text."),
        (["generate", "The", "sky", "is"], "the prompt is followed by 'sky is'. Quote a prompt"),
        (["chat", "a.gguf", "b.gguf"], "too many arguments: 'b.gguf'. See tiercel chat --help."),
        (["inspect", "a.gguf", "b.gguf"], "b.gguf"),
        (["inspect", "--temperature", "1"], "--temperature"),
        (["generate", "x", "--file", "y"], "given twice"),
        (["generate", "x", "--config", "missing.toml"], "missing.toml: the configuration file"),
        (["generate", "\udcff"], "not valid UTF-8"),
        (["generate", "x", "--temperature", "3.5"], "temperature=3.5 is out of range. Use 0.0"),
        (["generate", "x", "--n", "0"], "n=0 is out of range"),
        (["chat", "--max-tokens", "0"], "max_tokens=0 is out of range"),
        (["serve", "--temperature", "-1"], "temperature=-1.0 is out of range"),
        (["score", "--max-model-len", "0"], "--max-model-len"),
        (["generate", "x", "--gpu-memory-utilization", "nan"], "--gpu-memory-utilization"),
        (["serve", "--tool-parser", "nonsense"], "nonsense"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs"),
    ],
    ids=lambda value: (
        " ".join(value).encode(errors="replace").decode() if isinstance(value, list) else ""
    ),
)
def test_wrong_use_is_one_line_and_status_2(arguments, words, capsys):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "missing.gguf"], "missing.gguf: the path does not exist."),
        (["inspect", "smolm2"], "Did you mean smollm2?"),
        (["inspect", "org/name", "--offline"], "org/name: the model is not on this machine"),
        (["generate", "--file", "missing.txt"], "missing.txt: No such file or directory"),
        (["chat", "--load", "missing.json"], "missing.json: No such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_failures_are_one_line(arguments, words, capsys):
    status = run(arguments)
    captured = capsys.readouterr()
    assert status == 1
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_verbose_adds_the_traceback(capsys):
    assert run(["inspect", "missing.gguf", "--verbose"]) == 1
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert error.splitlines()[-1].startswith("error: missing.gguf: ")


def test_a_fault_of_ours_is_one_line_too(monkeypatch, capsys):
    def fail(*_args, **_kwargs):
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("tiercel.loader.hub.resolve", fail)
    assert run(["inspect", "x.gguf"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "internal error: ZeroDivisionError: two lines" in error
    assert "--verbose" in error


def test_out_of_memory_is_one_line(monkeypatch, capsys):
    def fail(*_args, **_kwargs):
        raise MemoryError

    monkeypatch.setattr("tiercel.loader.hub.resolve", fail)
    assert run(["inspect", "x.gguf"]) == 1
    assert capsys.readouterr().err.startswith("error: out of memory: ")


def test_unsupported_architecture_lists_the_supported_ones(tmp_path, here):
    path = tiny_model(tmp_path / "m.gguf", metadata={"general.architecture": "mamba"})
    line = error_line(here("generate", "x", "--model", path))
    assert "m.gguf: architecture 'mamba' is not supported." in line
    for name in ("llama", "qwen2", "qwen3", "gemma3"):
        assert name in line


def test_no_colour_and_no_bars_without_a_terminal(model):
    process = tiercel("inspect", model, "--verify", env={"FORCE_COLOR": ""})
    assert process.returncode == 0
    assert "\x1b" not in process.stdout + process.stderr


def run_on_terminal(arguments, env):
    """Run with standard error on a pseudo-terminal; returns the status and its output."""
    import pty

    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=follower,
        stderr=follower,
        stdin=subprocess.DEVNULL,
        env=environment(TERM="xterm", **env),
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:  # the last writer has closed it
            break
        if not data:
            break
        shown += data
    os.close(leader)
    return process.wait(60), shown.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "missing.gguf"],
        ["--help"],
        pytest.param(["inspect", "--tset"], marks=pytest.mark.slow),
    ],
)
def test_no_color_is_honoured_on_a_terminal(arguments):
    _, plain = run_on_terminal(arguments, {"NO_COLOR": "1"})
    assert "\x1b" not in plain
    _, coloured = run_on_terminal(arguments, {})
    assert "\x1b" in coloured


def test_a_closed_pipe_ends_quietly(model):
    with subprocess.Popen(
        [*COMMAND, "inspect", str(model), "--tensors", "--template"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        process.stdout.close()  # before anything is written
        error = process.stderr.read()
        assert process.wait(60) in (0, 141)
    assert error == b""


def test_help_into_a_closed_pipe_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [*COMMAND, "--help"], stdout=writer, stderr=subprocess.PIPE, env=environment(), check=False
    )
    os.close(writer)
    assert process.returncode == 141
    assert process.stderr == b""


def test_ctrl_c_during_the_first_imports_ends_quietly(monkeypatch):
    def interrupt(_name):
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupt)
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 130


@pytest.mark.parametrize(
    "stream", ["1", "0 1 2", *(pytest.param(one, marks=pytest.mark.slow) for one in "02")]
)
def test_closed_standard_streams(model, stream):
    close = " ".join(f"{number}>&-" for number in stream.split())
    process = subprocess.run(
        ["sh", "-c", f'exec "$@" {close}', "sh", *COMMAND, "inspect", str(model)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert process.returncode == 0
    assert process.stderr == ""
    assert ("Hyperparameters" in process.stdout) == ("1" not in stream)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output(model):
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [*COMMAND, "inspect", str(model)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            check=False,
        )
    assert process.returncode == 1
    assert process.stderr.startswith("error: ")
    assert "No space left on device" in process.stderr
    assert process.stderr.count("\n") == 1


def test_no_home_folder(model):
    env = environment()
    env.pop("HOME", None)
    env.pop("TIERCEL_CACHE", None)
    process = subprocess.run(
        [*COMMAND, "inspect", str(model)], capture_output=True, env=env, check=False
    )
    assert process.returncode == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_with_their_status(tmp_path, number, status):
    os.mkfifo(tmp_path / "prompt")
    with subprocess.Popen(
        [*COMMAND, "generate", "--file", str(tmp_path / "prompt")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        with open(tmp_path / "prompt", "wb"):  # returns when the command reads its prompt
            process.send_signal(number)
            assert process.wait(60) == status
        assert process.stderr.read() == b""


def write_config(path, text):
    path.write_text(text)
    return ["--config", str(path)]


@pytest.fixture
def seen(monkeypatch):
    """Stops `generate` after its options are known; returns them."""
    options = {}

    def stop(sampling, **_kwargs):
        options["temperature"] = sampling.temperature
        options["top_k"] = sampling.top_k
        raise KeyboardInterrupt

    monkeypatch.setattr("tiercel.cli.generate.make_params", stop)
    for name in [name for name in os.environ if name.startswith("TIERCEL_")]:
        monkeypatch.delenv(name)
    return options


def test_flags_win_over_environment_over_file(seen, tmp_path, monkeypatch):
    config = write_config(tmp_path / "c.toml", "temperature = 0.1\ntop_k = 11\n")
    run(["generate", "x"])
    assert seen == {"temperature": None, "top_k": None}
    run(["generate", "x", *config])
    assert seen == {"temperature": 0.1, "top_k": 11}
    monkeypatch.setenv("TIERCEL_TEMPERATURE", "0.2")
    run(["generate", "x", *config])
    assert seen == {"temperature": 0.2, "top_k": 11}
    run(["generate", "x", *config, "--temperature", "0.3"])
    assert seen == {"temperature": 0.3, "top_k": 11}
    monkeypatch.setenv("TIERCEL_CONFIG", config[1])
    monkeypatch.delenv("TIERCEL_TEMPERATURE")
    run(["generate", "x"])
    assert seen == {"temperature": 0.1, "top_k": 11}


def test_a_table_of_the_file_is_for_its_command(seen, tmp_path):
    text = "top-k = 11\n[generate]\ntop-k = 12\n[chat]\ntemperature = 0.9\n"
    run(["generate", "x", *write_config(tmp_path / "c.toml", text)])
    assert seen == {"temperature": None, "top_k": 12}


def test_options_of_other_commands_may_be_in_the_file(tmp_path, model, capsys):
    config = write_config(tmp_path / "c.toml", f'temperature = 0.1\nmodel = "{model}"\n')
    assert run(["inspect", "--json", *config]) == 0
    assert json.loads(capsys.readouterr().out)["file"]["path"] == str(model)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "temprature = 1\n",
            "'temprature' is not an option of the command line. Did you mean temper",
        ),
        ("[generate]\nprompt2 = 1\n", "'generate.prompt2' is not an option"),
        ("[publish]\nport = 1\n", "'publish' is not an option"),
        ("config = 'x'\n", "'config' is not an option"),
        ("temperature = \n", "is not TOML"),
        ("a = " + "[" * 5000, "is not TOML"),
        ("\x00", "is not TOML"),
        ("temperature = 'warm'\n", "unable to convert"),
        ("temperature = [1, 2]\n", "temperature"),
        ("top_k = 2.5\n", "[top-k]: '2.5' is not a whole number."),
    ],
)
def test_wrong_configuration_files(seen, tmp_path, capsys, text, words):
    assert run(["generate", "x", *write_config(tmp_path / "c.toml", text)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error


def test_a_configuration_file_without_end(capsys):
    assert run(["generate", "x", "--config", "/dev/zero"]) == 2
    assert "the configuration file is over" in capsys.readouterr().err


def test_an_empty_variable_counts_as_unset(seen, tmp_path, monkeypatch):
    for name in ("TEMPERATURE", "TOP_K", "STOP", "ECHO", "MODEL", "CONFIG"):
        monkeypatch.setenv(f"TIERCEL_{name}", "")
    run(["generate", "x", *write_config(tmp_path / "c.toml", "top_k = 11.0\n")])
    assert seen == {"temperature": None, "top_k": 11}


def test_environment_value_that_cannot_be_read(capsys, monkeypatch):
    monkeypatch.setenv("TIERCEL_TOP_K", "many")
    assert run(["generate", "x"]) == 2
    error = capsys.readouterr().err
    assert "TIERCEL_TOP_K" in error or "--top-k" in error


def test_variables_that_no_command_reads_are_said_in_one_line(capsys, monkeypatch):
    for name in [name for name in os.environ if name.startswith("TIERCEL_")]:
        monkeypatch.delenv(name)
    known = {"TEMPERATURE": "0", "PORT": "1", "OTLP_TRACES_ENDPOINT": "http://x", "EXACT": "1"}
    for name, value in known.items():
        monkeypatch.setenv(f"TIERCEL_{name}", value)
    command = ["inspect", "missing.gguf"]
    assert run(command) == 1
    (error,) = capsys.readouterr().err.splitlines()
    for name in ("SERVE_PORT", "API_KEYS", "SERVICE_HOST"):
        monkeypatch.setenv(f"TIERCEL_{name}", "secret")
    assert run([*command, "-q"]) == 1
    assert capsys.readouterr().err.splitlines() == [error]
    assert run(command) == 1
    assert capsys.readouterr().err.splitlines() == [
        "warning: set, but read by no command: TIERCEL_API_KEYS (TIERCEL_API_KEY?),"
        " TIERCEL_SERVE_PORT (TIERCEL_PORT?), TIERCEL_SERVICE_HOST.",
        error,
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_is_written(tmp_path, shell, here, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    target = tmp_path / "completion"
    done = here("--install-completion", "--shell", shell, "--output", target)
    assert done.returncode == 0, done.stderr
    assert "generate" in target.read_text()
