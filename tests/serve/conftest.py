"""Fixtures of the server's tests: a tiny model file, and a real server on it for the session."""

import pytest

from tests.gguf_files import tiny_model
from tests.serve.harness import start_server


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A sound model of 2 layers and 64 channels with a chat template."""
    return tiny_model(tmp_path_factory.mktemp("serve") / "tiny.gguf", context=2048)


@pytest.fixture(scope="session")
def server(tiny, tmp_path_factory):
    """A `tiercel serve` process; see `harness.RunningServer`. Tests leave it as they found it."""
    with start_server(tiny, log_path=tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


@pytest.fixture(scope="session")
def default_server(default_model, tmp_path_factory):
    """The same on the default model, for clients that should get sensible answers."""
    log_path = tmp_path_factory.mktemp("log") / "default_server.log"
    with start_server(default_model, log_path=log_path) as running:
        yield running


@pytest.fixture
def log_path(tmp_path):
    """For the log of a server that a test starts itself."""
    return tmp_path / "server.log"
