"""Check that a file of the cache is complete: its size always, its hash once for each change."""

import errno
import hashlib
import os
import random
from pathlib import Path

import pytest

from tiercel.errors import ModelNotFoundError
from tiercel.loader import store
from tiercel.loader.store import Content

DATA = random.Random(0).randbytes(3 * 4096 + 5)


def sha256_of(data):
    return Content(len(data), hashlib.sha256(data).hexdigest())


def git_name_of(data):
    """The name of a file by `git hash-object`."""
    header = b"blob " + str(len(data)).encode() + b"\0"
    return Content(len(data), hashlib.sha1(header + data, usedforsecurity=False).hexdigest())


@pytest.fixture
def counted(monkeypatch):
    """The number of times that a file was hashed."""
    calls = []
    original = store.hash_file

    def count(*arguments):
        calls.append(arguments[0])
        return original(*arguments)

    monkeypatch.setattr(store, "hash_file", count)
    monkeypatch.setattr(store, "CHUNK_BYTES", 4096)
    return calls


@pytest.mark.parametrize("content_of", [sha256_of, git_name_of])
def test_a_file_is_whole_if_every_byte_is_right(content_of, counted, tmp_path):
    """A file of another size is not even hashed."""
    path, stamp = tmp_path / "x", tmp_path / "x.ok"
    content = content_of(DATA)
    for data in (DATA, DATA[:-1], DATA + b"x", b"", b"y" + DATA[1:], DATA[:-1] + b"\0"):
        path.write_bytes(data)
        stamp.unlink(missing_ok=True)
        counted.clear()
        is_whole = data == DATA
        assert store.is_sound(path, content, stamp, None) == is_whole
        assert stamp.exists() == is_whole
        assert len(counted) == (len(data) == len(DATA))
        assert store.is_present(path, content) == (len(data) == len(DATA))
    path.unlink()
    assert not store.is_sound(path, content, stamp, None)
    assert not store.is_present(path, content)
    path.mkdir()
    assert not store.is_sound(path, content, stamp, None)
    assert not store.is_present(path, content)


def test_the_known_names_of_git():
    """An empty file and a file of one line, with git's own names."""
    assert git_name_of(b"").digest == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    content = Content(6, "ce013625030ba8dba906f756967f9e9ca394464a")
    hasher = content.hasher()
    hasher.update(b"hello\n")
    assert hasher.hexdigest() == content.digest


def test_a_file_is_hashed_once_for_each_change(counted, tmp_path):
    path, stamp = tmp_path / "x", tmp_path / "x.ok"
    path.write_bytes(DATA)
    content = sha256_of(DATA)
    for _ in range(3):
        assert store.is_sound(path, content, stamp, None)
    assert len(counted) == 1
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))  # changed, though of the same size
    assert store.is_sound(path, content, stamp, None)
    assert len(counted) == 2
    path.write_bytes(b"z" + DATA[1:])
    os.utime(path, ns=(5, 5))
    assert not store.is_sound(path, content, stamp, None)
    assert len(counted) == 3
    other = Content(len(DATA), "0" * 64)  # the stamp is of another hash
    assert not store.is_sound(path, other, stamp, None)
    moved = path.rename(tmp_path / "y")  # and of another path
    moved.write_bytes(DATA)
    os.utime(moved, ns=(5, 5))
    assert store.is_sound(moved, content, stamp, None)
    assert len(counted) == 5


def test_progress_counts_every_byte(counted, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(DATA)
    seen = []
    store.is_sound(path, sha256_of(DATA), tmp_path / "ok", lambda *told: seen.append(told))
    assert [done for _, done, _ in seen] == [4096, 8192, 12288, len(DATA)]
    assert {(what, total) for what, _, total in seen} == {("Checking x", len(DATA))}


def test_names_beside_a_file(tmp_path):
    assert store.stamp_path(tmp_path / "m.gguf") == tmp_path / "m.gguf.ok"
    parts = {store.part_path(tmp_path / "m.gguf") for _ in range(20)}
    assert all(p.parent == tmp_path and p.name.startswith("m.gguf.") for p in parts)
    assert all(part.suffix == ".part" for part in parts)
    assert len(parts) == 20


def test_a_folder_of_ours_in_the_temporary_folder_is_used_again(tmp_path, monkeypatch):
    """A link, a file or another user's folder is not used: its contents could be swapped."""
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"tiercel-{os.getuid()}"
    for _ in range(2):
        assert store.fallback_folder(tmp_path / "unusable") == own
    assert own.stat().st_mode & 0o777 == 0o700
    own.rmdir()
    own.write_text("")
    (tmp_path / "elsewhere").mkdir()
    made = {store.fallback_folder(tmp_path)}
    own.unlink()
    own.symlink_to(tmp_path / "elsewhere")
    made.add(store.fallback_folder(tmp_path))
    own.unlink()
    monkeypatch.setattr(store.os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    (tmp_path / f"tiercel-{store.os.getuid()}").mkdir()
    made.add(store.fallback_folder(tmp_path))
    assert len(made) == 3
    assert all(path.name.startswith("tiercel-") and path.parent == tmp_path for path in made)
    assert not {own, tmp_path / f"tiercel-{store.os.getuid()}"} & made
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in made)


def test_the_folder_of_models_is_made_where_it_can_be(tmp_path, monkeypatch):
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TIERCEL_CACHE", str(tmp_path / "new" / "cache"))
    assert store.models_folder() == tmp_path / "new/cache/models"
    assert store.models_folder().is_dir()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIERCEL_CACHE", str(tmp_path / "file"))
    assert store.models_folder() == tmp_path / f"tiercel-{os.getuid()}"


def test_whether_a_folder_can_be_written(tmp_path, monkeypatch):
    """A full disk does not count as read-only: it has its own error."""
    assert store.is_writable(tmp_path) is True
    assert list(tmp_path.iterdir()) == []
    assert store.is_writable(tmp_path / "none") is False
    for number, expected in (
        (errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EROFS, False), (errno.EACCES, False),
    ):  # fmt: skip

        def fail(number=number, **_):
            raise OSError(number, "no")

        monkeypatch.setattr(store.tempfile, "TemporaryFile", fail)
        assert store.is_writable(tmp_path) is expected


def test_no_home_folder_is_no_folder_named_tilde(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(store.env, "cache_dir", lambda: Path("~/.cache/tiercel"))
    assert store.models_folder() == tmp_path / f"tiercel-{os.getuid()}"
    assert not (tmp_path / "~").exists()
    monkeypatch.setattr(store.env, "cache_dir", lambda: Path("relative"))
    assert store.models_folder() == tmp_path / "relative/models"


def test_the_lock_is_held_and_given_back(tmp_path):
    path = tmp_path / "lock"
    told = []
    with store.locked(path, None, 1.0) as is_alone:
        assert is_alone is True
        again = store.locked(path, lambda *what: told.append(what), 0.01)
        with pytest.raises(ModelNotFoundError, match="another process has held it"), again:
            pass
    assert told == [("Waiting for another process that downloads the model", 0, 0)]
    with store.locked(path, None, 1.0) as is_alone:
        assert is_alone is True
