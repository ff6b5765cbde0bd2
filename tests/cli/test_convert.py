"""`tiercel convert`: its output, its refusals without PyTorch, and Ctrl-C."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from tests.cli.harness import COMMAND, ROOT, environment, error_line, tiercel
from tests.dsv4_files import TINY, released_tensors, save_folder
from tiercel.cli.main import _EXAMPLES, run
from tiercel.models.source import open_source

MATRIX = "layers.2.ffn.experts.1.w2"


@pytest.fixture
def wide(tmp_path):
    """A checkpoint of which one matrix has scales that E4M3 does not hold."""
    tensors = released_tensors()
    tensors[f"{MATRIX}.scale"].view(torch.uint8)[:] = 130
    tensors[f"{MATRIX}.scale"].view(torch.uint8)[3, 0] = 112  # 19 powers of two
    values = tensors[f"{MATRIX}.weight"].view(torch.uint8)
    values[0, 0], values[3, 0] = 7, 1  # 6 and 0.5
    return save_folder(tmp_path / "wide", tensors)


def test_a_summary_is_written(tmp_path, capsys):
    assert run(["convert", str(TINY), str(tmp_path / "out"), "--max-error", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out == (
        f"{tmp_path / 'out'}: 72 expert matrices in NVFP4, 72 exactly and 0 rounded; 0.00 GB\n"
    )
    assert run(["inspect", "--model", str(tmp_path / "out"), "--json"]) == 0
    types = {row["type"] for row in json.loads(capsys.readouterr().out)["weights"]}
    assert {"NVFP4", "MXFP4", "FP8_BLOCK"} <= types


def test_a_rounded_matrix_is_reported_or_refused(wide, tmp_path, capsys):
    command = ["convert", str(wide), str(tmp_path / "out")]
    assert run([*command, "--max-error", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: wide: tensor '{MATRIX}.weight' would have a relative error of ")
    assert line.endswith("Raise --max-error to accept it; nothing was written.")
    assert [path.name for path in tmp_path.iterdir()] == ["wide"]
    assert run([*command, "--max-error", "1e-3"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{MATRIX}.weight: rounded, scales span 19 powers of two, largest err")
    assert last.endswith(": 72 expert matrices in NVFP4, 71 exactly and 1 rounded; 0.00 GB")
    open_source(tmp_path / "out")


def test_help_and_refusals_come_without_pytorch(tmp_path):
    """One process for all of them."""
    refused = [
        ([str(TINY)], "OUT requires an argument"),
        ([str(TINY), "out", "--max-error", "-1"], "--max-error"),
        (["none", "out"], "none: the file cannot be opened"),
        ([str(TINY), str(TINY)], "must not hold each other"),
    ]
    code = (
        "import sys\n"
        "from tiercel.cli.main import run\n"
        f"lines = {[['--help'], *(arguments for arguments, _ in refused)]!r}\n"
        "statuses = [run(['convert', *arguments]) for arguments in lines]\n"
        "print(*statuses, 'torch' in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, env=environment(), check=True, cwd=tmp_path,
    )  # fmt: skip
    assert process.stdout.splitlines()[-1] == "0 2 2 1 1 False"
    errors = process.stderr.splitlines()
    for (_, words), error in zip(refused, errors, strict=True):
        assert words in error
    assert not list(tmp_path.iterdir())


def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
    """In their order: the second replaces what the first has written."""
    page = (ROOT / "docs/deepseek_v4.md").read_text().partition("## Converting")[2]
    commands = re.findall(r"^    tiercel (convert .+)$", page, re.MULTILINE)
    assert commands == [line.removeprefix("tiercel ") for line in _EXAMPLES["convert"]]
    shutil.copytree(TINY, tmp_path / "DeepSeek-V4-Flash")
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert run(shlex.split(command)) == 0
    assert capsys.readouterr().out.count("72 exactly and 0 rounded") == 2


def test_force_replaces_a_model(tmp_path, here):
    out = save_folder(tmp_path / "out", released_tensors())
    assert "the folder is not empty" in error_line(here("convert", TINY, out))
    process = tiercel("convert", TINY, out, "--force", "-q")
    assert process.returncode == 0
    assert "72 exactly" in process.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_signals_leave_nothing(tmp_path, number, status):
    """A pipe as a file to copy holds the conversion up until the signal has come."""
    folder = save_folder(tmp_path / "in", released_tensors())
    (folder / "tokenizer.model").touch()
    code = (
        "import shutil, sys, os\n"
        "from tiercel.cli.main import run\n"
        "shutil.copyfile = lambda *_: open(os.environ['GATE'], 'rb').read()\n"
        f"sys.exit(run(['convert', {str(folder)!r}, {str(tmp_path / 'out')!r}]))"
    )
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with subprocess.Popen(
        [COMMAND[0], "-c", code], stderr=subprocess.PIPE, env=environment(GATE=str(gate))
    ) as process:
        writer = open(gate, "wb")  # noqa: SIM115 - returns when the conversion has come to it
        process.send_signal(number)
        assert process.wait(60) == status
        writer.close()
        assert process.stderr.read() == b""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gate", "in"]
