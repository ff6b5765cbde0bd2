"""Hostile model files end in one line, quickly, in little memory, before PyTorch is imported."""

import json
import os
import subprocess
import sys

import pytest

from tests.cli.harness import ROOT, environment, error_line, tiercel
from tests.gguf_files import tiny_model
from tests.hostile_files import hostile_files

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(300)]

MAX_BYTES = 300 << 20  # above the import cost
MAX_S = 20  # of the processor; the promise is 2 s, and a busy machine gets more


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every hostile file, under a name that says what is wrong with it."""
    folder = tmp_path_factory.mktemp("hostile")
    for index, (name, write) in enumerate(hostile_files()):
        safe = "".join(c if c.isalnum() else "-" for c in name)[:80]
        write(folder / f"{index:03}-{safe}.gguf")
    return folder


COMMANDS = {
    "inspect": ("inspect", "{}", "--verify"),
    "generate": ("generate", "x", "--model", "{}"),
    "chat": ("chat", "{}"),  # opens as generate does
}
DEFAULT_TURNS = (("inspect", 0), ("generate", 2))
# By default every second file by one command; loader/test_gguf_hostile.py and
# models/test_hostile_models.py have each of them.
TURNS = [
    pytest.param(name, turn, marks=[pytest.mark.slow] * ((name, turn) not in DEFAULT_TURNS))
    for name in COMMANDS
    for turn in range(4)
]


@pytest.mark.parametrize(("name", "turn"), TURNS)
def test_every_hostile_file_is_refused(folder, name, turn):
    paths = sorted(folder.iterdir())[turn::4]
    process = subprocess.run(
        [sys.executable, "-m", "tests.cli.fork_driver", *COMMANDS[name], "--", *map(str, paths)],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        timeout=280,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    results = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(results) == len(paths) > 25
    for result in results:
        assert result["status"] == 1, result
        assert result["stdout"] == "", result
        assert result["stderr"].startswith(f"error: {result['name']}: "), result
        assert result["stderr"].count("\n") == 1, result
        assert "internal error" not in result["stderr"], result
        assert result["processor_seconds"] < MAX_S, result
        assert result["above_import_bytes"] < MAX_BYTES, result


@pytest.mark.parametrize("command", [("inspect",), ("generate", "x")], ids=lambda c: c[0])
def test_a_process_of_its_own_refuses_too(folder, command):
    path = sorted(folder.iterdir())[-1]
    model = ("--model", path)
    assert path.name in error_line(tiercel(*command, *model))


def test_weights_that_are_not_finite(tmp_path, here):
    path = tmp_path / "nan.gguf"
    tiny_model(path)
    clean = here("inspect", path, "--verify")
    assert clean.returncode == 0, clean.stderr
    assert "no NaN" in clean.stdout
    facts = json.loads(here("inspect", path, "--tensors", "--json").stdout)
    tensor = next(t for t in facts["tensors"] if t["type"] == "F32")
    with path.open("r+b") as stream:
        stream.seek(tensor["offset"])
        stream.write(b"\x00\x00\xc0\x7f")
    damaged = here("inspect", path, "--verify", "--json")
    assert damaged.returncode == 1
    assert json.loads(damaged.stdout)["verified"] is False
    assert damaged.stderr.startswith("error: nan.gguf: tensor")
    assert damaged.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "link"])
def test_what_is_no_file(tmp_path, kind, here):
    path = tmp_path / "model.gguf"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to(tmp_path / "missing")
    assert "model.gguf" in error_line(here("inspect", path))
