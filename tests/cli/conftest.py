"""Fixtures of the command-line tests."""

import io
import logging
import signal
import subprocess
import sys

import pytest

from tests.cli.fakes import FakeLLM
from tests.gguf_files import tiny_model
from tiercel.cli.main import run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A valid model file of a few kilobytes with random weights."""
    return tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def fake_llm(monkeypatch):
    """Replaces the model of the commands; the file is still checked."""
    monkeypatch.setattr("tiercel.llm.LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "calls", [])
    return FakeLLM


@pytest.fixture
def stdin(monkeypatch):
    """Sets the contents of standard input, which is not a terminal."""

    def put(data):
        raw = data if isinstance(data, bytes) else data.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))

    return put


@pytest.fixture
def here(stdin, capsys):
    """Runs a command line in this process; what it returns is like that of `harness.tiercel`."""

    def call(*arguments):
        stdin("")
        status = run(list(map(str, arguments)))
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, shown.out, shown.err)

    return call


@pytest.fixture(autouse=True)
def _restored_process():
    """`run` owns its process: restore pytest's signals and log handlers."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    logger = logging.getLogger("tiercel")
    logger.handlers = []
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
