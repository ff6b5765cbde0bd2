"""The model cache on disk: its folder, its lock, and how a file in it is known to be whole.

Invariant: a file under its final name is complete. It is written under a `.part` name, hashed,
flushed, then renamed. A `.ok` file (the stamp) remembers size, time and hash, so that only the
first use reads all of it. A lock keeps two processes from fetching twice; without a working lock
(some network file systems) both fetch, and the last rename wins.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from tiercel import env
from tiercel.errors import ModelNotFoundError

if TYPE_CHECKING:
    from hashlib import _Hash

Report = Callable[[str, int, int], None]  # (what is done, bytes done, bytes in all)

CHUNK_BYTES = 1 << 20
POLL_S = 0.2
FULL = (errno.ENOSPC, errno.EDQUOT)

_log = logging.getLogger("tiercel")


@dataclass(frozen=True, slots=True)
class Content:
    """What a file must hold.

    Attributes:
        size_bytes: its size.
        digest: SHA-256, 64 hexadecimal digits; or git's name for it, 40: the SHA-1 of a header and
            the bytes.
    """

    size_bytes: int
    digest: str

    def hasher(self) -> _Hash:
        """A new hash object to feed the file's bytes to."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        header = f"blob {self.size_bytes}\0".encode()
        return hashlib.sha1(header, usedforsecurity=False)


def models_folder() -> Path:
    """The folder that keeps fetched models, made if need be.

    A cache folder that cannot be written but holds models is still read. One that cannot be made is
    replaced, with a warning, by a folder of this user under the temporary folder.
    """
    folder = env.cache_dir() / "models"
    if not str(folder).startswith("~"):  # no home folder is known: platformdirs leaves the tilde
        folder = folder.absolute()
        if folder.is_dir() or _try_make(folder):
            return folder
    return fallback_folder(folder)


def _try_make(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return True


def is_writable(folder: Path) -> bool:
    """Whether files can be made in `folder`; a full disk does not count as read-only."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        return error.errno in FULL  # it gets an error of its own


def fallback_folder(unusable: Path) -> Path:
    """A folder under the temporary folder that only this user can write."""
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"tiercel-{user}"
    is_ours = False
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        stat = folder.lstat()  # another user may have made it, or a link, to swap files under us
        is_ours = folder.is_dir() and not folder.is_symlink()
        is_ours = is_ours and (not hasattr(os, "getuid") or stat.st_uid == os.getuid())
    if not is_ours:
        folder = Path(tempfile.mkdtemp(prefix="tiercel-"))
    _log.warning("the cache folder %s cannot be written; using %s instead.", unusable, folder)
    return folder


@contextlib.contextmanager
def locked(path: Path, report: Report | None, timeout_s: float) -> Iterator[bool]:
    """Hold the lock at `path`; yields False where the file system has no locks.

    Args:
        path: the lock file, made if need be.
        report: told when another process has the lock.
        timeout_s: how long to wait for it; -1 is for ever.

    Raises:
        ModelNotFoundError: the other process still has it.
    """
    lock = filelock.FileLock(path)
    try:
        try:
            lock.acquire(timeout=POLL_S)
        except filelock.Timeout:
            if report is not None:
                report("Waiting for another process that fetches the model", 0, 0)
            lock.acquire(timeout=timeout_s)
        is_alone = True
    except filelock.Timeout:
        raise ModelNotFoundError(
            f"{path}: another process has held it for over {timeout_s / 60:.0f} minutes.",
            hint="End that process, or remove the file if there is none.",
        ) from None
    except (OSError, NotImplementedError) as error:
        _log.debug("no lock at %s: %s", path, error)
        is_alone = False
    try:
        yield is_alone
    finally:
        lock.release()


def stamp_path(path: Path) -> Path:
    """Where `is_sound` remembers, beside the file, that it was hashed."""
    return path.with_name(path.name + ".ok")


def part_path(path: Path) -> Path:
    """A name that no other process uses, beside `path`."""
    return path.with_name(f"{path.name}.{os.getpid()}-{time.time_ns():x}.part")


def is_present(path: Path, content: Content) -> bool:
    """Whether a file of the right size lies at `path`; its bytes are not read."""
    with contextlib.suppress(OSError):
        return path.is_file() and path.stat().st_size == content.size_bytes
    return False


def is_sound(path: Path, content: Content, stamp: Path, report: Report | None) -> bool:
    """Whether `path` holds `content`: the size always, the hash once for each size and time."""
    try:
        stat = path.stat()
        if not path.is_file() or stat.st_size != content.size_bytes:
            return False
        record = json.dumps([str(path), stat.st_size, stat.st_mtime_ns, content.digest])
        with contextlib.suppress(OSError, ValueError):
            if stamp.read_text() == record:
                return True
        if hash_file(path, content, report) != content.digest:
            return False
    except OSError:
        return False
    with contextlib.suppress(OSError):  # a cache that cannot be written is hashed at each start
        part = part_path(stamp)
        part.write_text(record)
        part.replace(stamp)
    return True


def hash_file(path: Path, content: Content, report: Report | None) -> str:
    """The digest of a file's bytes, of the kind that `content` has."""
    hasher = content.hasher()
    done = 0
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            hasher.update(chunk)
            done += len(chunk)
            if report is not None:
                report(f"Checking {path.name}", done, content.size_bytes)
    return hasher.hexdigest()
