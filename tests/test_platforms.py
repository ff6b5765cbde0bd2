"""Platforms without `/proc` or without `resource`, like macOS and Windows, and their messages."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiercel
from tests.cli.harness import environment
from tests.cli.harness import tiercel as start
from tests.gguf_files import tiny_model
from tests.tiny_llm import LLAMA
from tiercel import machine
from tiercel.cli import loading
from tiercel.cli import serve as serve_command
from tiercel.cli.main import run
from tiercel.engine import load as build
from tiercel.errors import InstallationError, InvalidRequestError
from tiercel.llm import LLM
from tiercel.text import child_client
from tiercel.text.chat_template import ChatTemplate

ROOT = Path(__file__).parents[1]
HIDE = ROOT / "tests/other_platform/hide.py"
PATHS = os.pathsep.join([str(ROOT / "tests/other_platform"), str(ROOT)])


@pytest.fixture(
    params=[
        pytest.param("", id="no /proc", marks=pytest.mark.slow),
        pytest.param("1", id="no /proc, no resource"),
    ]
)
def elsewhere(request):
    """Environment of a process that sees another platform."""
    return {"PYTHONPATH": PATHS, "HIDES_RESOURCE": request.param}


def test_the_platform_is_hidden(elsewhere):
    code = "import importlib, pathlib; print(importlib.util.find_spec('hide').origin)\n"
    code += "pathlib.Path('/proc/meminfo').read_text()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(**elsewhere), capture_output=True, text=True
    )
    assert done.stdout.strip() == str(HIDE)
    assert "FileNotFoundError" in done.stderr


def test_text_is_generated(elsewhere):
    arguments = ("generate", "the thin man", "-m", LLAMA, "--max-tokens", "4")
    done = start(*arguments, env=elsewhere)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_chat_is_held(elsewhere, tmp_path):
    path = tiny_model(tmp_path / "m.gguf")
    done = start("chat", path, "--max-tokens", "4", stdin="the cat\n", env=elsewhere)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_doctor_and_inspect_work():
    elsewhere = {"PYTHONPATH": PATHS, "HIDES_RESOURCE": "1"}
    for arguments in (("doctor", "--json"), ("inspect", LLAMA)):
        done = start(*arguments, env=elsewhere)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def without_resource(monkeypatch):
    """Templates are rendered by a child that has no `resource`."""
    real = child_client._command

    def command(program):
        python, flag, *rest = real(program)
        return [python, flag, str(HIDE), "1", *rest]

    monkeypatch.setattr(child_client, "_command", command)


def test_a_child_without_limits_is_watched(without_resource, monkeypatch):
    """The parent ends it where no kernel bounds its memory; the next request gets a new one."""
    monkeypatch.setattr(child_client, "MEMORY_BYTES", 50 << 20)
    source = "{% set a = 'x' * (messages | length - 1) * 400000000 %}{{ messages[0].content }}"
    template = ChatTemplate(source, name="m")
    message = {"role": "user", "content": "a"}
    try:
        with pytest.raises(InvalidRequestError, match="the memory or time it may use"):
            template.render([message, message])
        assert template.render([message]) == "a"
    finally:
        template.close()


def test_what_platforms_are_told():
    assert machine.check_platform("linux") is None
    assert "not tested on a real macOS machine" in machine.check_platform("darwin")
    assert "not tested on a real freebsd14 machine" in machine.check_platform("freebsd14")
    with pytest.raises(InstallationError, match="does not run on Windows") as caught:
        machine.check_platform("win32")
    assert "WSL 2" in caught.value.hint


def test_the_warning_of_a_platform_is_printed_at_start(monkeypatch, capsys):
    monkeypatch.setattr(loading, "check_platform", lambda: machine.check_platform("darwin"))
    arguments = ["generate", "the cat", "-m", str(LLAMA), "--max-tokens", "1"]
    assert run(arguments) == 0
    assert "warning: Tiercel was not tested on a real macOS" in capsys.readouterr().err
    assert run([*arguments, "--quiet"]) == 0
    assert "macOS" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (loading, ["generate", "the cat", "-m", str(LLAMA)]),
        (serve_command, ["serve", str(LLAMA), "--port", "0"]),
    ],
    ids=["generate", "serve"],
)
def test_windows_is_refused_before_loading(monkeypatch, capsys, module, arguments):
    monkeypatch.setattr(module, "check_platform", lambda: machine.check_platform("win32"))
    assert run(arguments) == 1
    assert "error: Tiercel does not run on Windows itself. Use WSL 2" in capsys.readouterr().err


def test_the_python_api_refuses_windows(monkeypatch):
    monkeypatch.setattr(build, "check_platform", lambda: machine.check_platform("win32"))
    with pytest.raises(InstallationError, match="Windows"):
        LLM(LLAMA)


@pytest.mark.parametrize(
    ("name", "has_torch", "given", "expected"),
    [
        ("LLM", False, None, "3000"),
        ("AsyncLLM", False, None, "3000"),
        ("LLM", False, "7", "7"),
        ("LLM", True, None, None),
        ("SamplingParams", False, None, None),
    ],
    ids=["LLM", "AsyncLLM", "a value of the user", "PyTorch is there already", "no PyTorch"],
)
def test_the_python_api_shortens_spins(monkeypatch, name, has_torch, given, expected):
    for module in ("tiercel.llm", "tiercel.async_llm", "tiercel.params"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: object()}))
    monkeypatch.setenv("GOMP_SPINCOUNT", given or "")
    if given is None:
        monkeypatch.delenv("GOMP_SPINCOUNT")
    if not has_torch:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    getattr(tiercel, name)
    assert os.environ.get("GOMP_SPINCOUNT") == expected


@pytest.mark.parametrize("value", ["0", "-1", "1025", "two", "1.5"])
@pytest.mark.parametrize("command", [["generate", "x"], ["serve"], ["bench", "speed"]], ids=str)
def test_threads_of_the_command_line_are_checked(command, value, capsys):
    assert run([*command, f"--threads={value}"]) == 2
    line, *more = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "--threads" in line
    assert not more
