"""A hub on this machine, and an empty cache."""

import pytest

from tests.loader.hub_cases import REPOSITORIES
from tests.loader.hub_server import Hub, Place
from tests.loopback import served
from tiercel.loader import hub_client, hub_pull


@pytest.fixture(scope="module")
def place():
    place = Place()
    with served(place) as place.address:
        yield place


@pytest.fixture
def server(place, tmp_path, monkeypatch):
    """A hub and an empty cache."""
    for name in ("TIERCEL_MODEL", "TIERCEL_OFFLINE", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TIERCEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_pull, "RETRY_DELAYS_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(hub_client.constants, "HF_HUB_OFFLINE", False)  # read at its import
    repositories = {name: dict(files) for name, files in REPOSITORIES.items()}
    place.hub = Hub(repositories)
    monkeypatch.setenv("HF_ENDPOINT", place.address)
    return place.hub


@pytest.fixture
def folder(tmp_path):
    """The folder of the files of `acme/tiny`."""
    return tmp_path / "cache/models/hub/acme/tiny/main"
