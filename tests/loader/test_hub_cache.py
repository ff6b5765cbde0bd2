"""Models of a hub in the cache: damage, no network, full disks, several processes."""

import errno
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import filelock
import pytest

from tests.loader.hub_cases import (
    FILE,
    GGUF,
    MODEL,
    OTHER,
    file_names,
    leftovers,
    pull,
    refusal,
    resolve,
)
from tests.loader.hub_server import COMMIT
from tests.patience import wait_for
from tiercel.loader import hub, hub_client, hub_folder, hub_pull


@pytest.mark.parametrize("damage", ["cut", "random", "gone"])
def test_a_damaged_model_is_fetched_again(server, damage):
    path = resolve()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(GGUF[:100] if damage == "cut" else b"x" * len(GGUF))
        os.utime(path, ns=(1, 1))
    assert "switched off" in refusal(resolve, offline=True)
    assert resolve().read_bytes() == GGUF


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"commit": "x", "files": [["a"]]}'])
def test_a_damaged_listing_is_asked_for_again(server, folder, damage):
    path = resolve()
    (folder / ".state/listing").write_bytes(damage)
    assert "switched off" in refusal(resolve, offline=True)
    assert resolve() == path
    assert len(server.asked("/storage/")) == 1  # the file itself was whole


@pytest.mark.parametrize("variable", [False, True])
def test_offline_asks_nothing(server, monkeypatch, variable):
    if variable:
        monkeypatch.setenv("TIERCEL_OFFLINE", "1")
    for function in (resolve, pull):
        assert "downloads are switched off" in refusal(function, offline=not variable)
    assert not server.requests


def test_the_librarys_own_offline_switch(server, monkeypatch):
    monkeypatch.setattr(hub_client.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal(resolve)
    assert not server.requests


@pytest.mark.parametrize("version", [None, "1.33.0"])
def test_the_missing_extra_is_named(server, monkeypatch, version):
    def look(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", look)
    assert "Run pip install 'tiercel[hub]'" in refusal(resolve)
    assert not server.requests


def test_nothing_heavy_is_imported_without_a_hub_name():
    code = (
        "import sys; from tiercel.loader import hub, hub_folder\n"
        "hub.resolve('.', offline=False, report=None)\n"
        "list(hub_folder.list_cached())\n"
        "print(sorted({'huggingface_hub', 'httpx2', 'torch'} & set(sys.modules)))"
    )
    root = str(Path(__file__).parents[2])
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert output.stdout.strip() == "[]"


def test_a_full_disk_is_seen_before_the_download(server, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10, 5, 5))
    assert "is full; 1 MB are missing" in refusal(resolve)
    assert not server.asked("/storage/")


def test_a_disk_that_fills_up(server, folder, monkeypatch):
    def full(_fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub_pull.os, "fsync", full)
    assert "is full" in refusal(resolve)
    assert file_names(folder / "tiny") == []
    monkeypatch.undo()


def test_a_cache_that_cannot_be_made(server, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TIERCEL_CACHE", str(tmp_path / "file"))
    text = refusal(resolve)
    assert "the model cannot be stored in" in text
    assert "TIERCEL_CACHE" in text


def test_a_read_only_cache(server, folder, monkeypatch):
    real = os.open

    def refuse(path, flags, *args, **kwargs):  # root may write anywhere: simulated
        if flags & os.O_CREAT and str(path).endswith(".part"):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    assert "cannot be stored" in refusal(resolve)
    assert "Read-only file system" in refusal(resolve)
    assert file_names(folder / "tiny") == []


SCRIPT = "from tiercel.loader import hub; print(hub.resolve('{}', offline=False, report=None))"


def start(model=MODEL):
    """A process that downloads the model."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(model)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(400)
def test_two_processes_at_once_fetch_one_copy(server, folder):
    server.pause_s = 0.05
    children = [start() for _ in range(2)]
    for child in children:
        output, error = child.communicate(timeout=120)
        assert child.returncode == 0, error
        assert Path(output.strip()).read_bytes() == GGUF
    assert len(server.asked("/storage/")) == 1
    assert not leftovers(folder)


@pytest.mark.timeout(400)
def test_a_killed_process_leaves_a_part_that_is_continued(server, folder):
    server.pause_s = 0.3
    child = start()
    wait_for(lambda: any((folder / part).stat().st_size for part in leftovers(folder)), 60)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert file_names(folder / "tiny") == []
    server.pause_s = 0.0
    server.requests.clear()
    assert resolve().read_bytes() == GGUF
    assert "range" in server.asked("/storage/")[0]


def test_a_file_system_without_locks(server, folder, monkeypatch):
    class NoLock(filelock.FileLock):
        def _acquire(self):
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock, "FileLock", NoLock)
    server.cut_after[FILE] = [150_000, 0, 0, 0, 0]
    assert "cannot be reached" in refusal(resolve)
    assert not leftovers(folder)  # another process could be writing: nothing is shared
    server.cut_after.clear()
    assert resolve().read_bytes() == GGUF


def test_remove(server, tmp_path):
    resolve(f"{MODEL}:Q8_0")
    resolve()
    pull(revision=COMMIT)
    assert hub.remove(f"{MODEL}:Q8_0", revision="main", report=None) == len(OTHER)
    assert [len(model.files) for model in hub_folder.list_cached()] == [1, 1]
    assert hub.remove(MODEL, revision=COMMIT, report=None) > len(GGUF)
    assert resolve(offline=True).exists()
    assert hub.remove(MODEL, revision=None, report=None) > len(GGUF)
    assert list(hub_folder.list_cached()) == []
    assert not (tmp_path / "cache/models/hub/acme").exists()
    for model in (MODEL, "acme/nothing", "smollm2"):
        assert "hold" in refusal(hub.remove, model, revision=None, report=None)


def test_an_existing_path_wins(server, tmp_path, monkeypatch):
    (tmp_path / "acme/tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve() == Path("acme/tiny")
    assert not server.requests
