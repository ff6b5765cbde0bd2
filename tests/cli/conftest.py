"""Fixtures of the command-line tests."""

import io
import sys

import pytest

from tests.cli.fakes import FakeLLM
from tests.gguf_files import tiny_model


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
