"""Clients that need an environment of their own: `make test-clients` builds it and says where.

The scripts of this folder run in that environment; the tests and the server run in the usual one.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.harness import ROOT, environment
from tests.serve.harness import start_server

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def server(default_model, tmp_path_factory):
    """`tiercel serve` with the default model."""
    log_path = tmp_path_factory.mktemp("log") / "server.log"
    with start_server(default_model, log_path=log_path) as running:
        yield running


@pytest.fixture(scope="session")
def run_client(tmp_path_factory):
    """Runs a module or script with the clients' Python; returns what it printed."""
    python = ROOT / os.environ.get("CLIENTS_PYTHON", ".venv-clients/bin/python")
    if not python.exists():
        pytest.skip(f"no {python}: run make test-clients")
    folder = tmp_path_factory.mktemp("client")

    def run(*arguments, seconds=300):
        process = subprocess.run(
            [str(python), *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=seconds,
            check=False,
            env=environment(
                LITELLM_LOCAL_MODEL_COST_MAP="True",  # else importing it asks the network
                HF_HUB_OFFLINE="1",
                HF_DATASETS_OFFLINE="1",
                HF_HOME=str(folder / "hf"),
                OPENAI_API_KEY="none",
                PYTHONPATH="",
            ),
        )
        assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-5000:]
        return process.stdout

    return run
