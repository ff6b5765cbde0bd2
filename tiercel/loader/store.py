"""The model cache on disk: its folder, its lock, and the check that a file in it is complete.

Invariant: a file under its final name is complete. It is written under a `.part` name, hashed,
flushed, then renamed. A `.ok` file (the stamp) records size, time and hash, so that only the
first use reads the whole file. A lock keeps two processes from downloading twice; without a
working lock (some network file systems) both download, and the last rename wins.
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
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from tiercel import env
from tiercel.errors import ModelNotFoundError

if TYPE_CHECKING:
    from hashlib import _Hash

Report = Callable[[str, int, int], None]  # (what is done, bytes done, total bytes)

CHUNK_BYTES = 1 << 20
POLL_S = 0.2
FULL = (errno.ENOSPC, errno.EDQUOT)

_log = logging.getLogger("tiercel")


class Content(Struct, frozen=True):
    """Expected content of a file.

    Attributes:
        size_bytes: size of the file.
        digest: SHA-256, 64 hexadecimal digits; or git's name for it, 40: the SHA-1 of a header and
            the bytes.
    """

    size_bytes: int
    digest: str

    def hasher(self) -> _Hash:
        """Make a new hash object for the file's bytes."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        header = f"blob {self.size_bytes}\0".encode()
        return hashlib.sha1(header, usedforsecurity=False)


def models_folder() -> Path:
    """The folder of downloaded models, created if need be.

    A cache folder that cannot be written but contains models is still read. One that cannot be
    created is replaced, with a warning, by a folder of this user under the temporary folder.
    """
    folder = env.cache_dir() / "models"
    if not str(folder).startswith("~"):  # the home folder is unknown: platformdirs leaves the tilde
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
    """Whether files can be created in `folder`; a full disk does not count as read-only."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        return error.errno in FULL  # it has its own error


def fallback_folder(unusable: Path) -> Path:
    """A folder under the temporary folder that only this user can write."""
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"tiercel-{user}"
    is_ours = False
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        stat = folder.lstat()  # another user may have created it, or a link, to swap files
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
        path: the lock file, created if need be.
        report: called when another process has the lock.
        timeout_s: longest wait for the lock; -1 waits for ever.

    Raises:
        ModelNotFoundError: another process still has the lock.
    """
    import filelock  # tens of ms with asyncio, for which a model that is there need not wait

    lock = filelock.FileLock(path)
    try:
        try:
            lock.acquire(timeout=POLL_S)
        except filelock.Timeout:
            if report is not None:
                report("Waiting for another process that downloads the model", 0, 0)
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
    """Path of the stamp next to the file, where `is_sound` records that it was hashed."""
    return path.with_name(path.name + ".ok")


def part_path(path: Path) -> Path:
    """A temporary name next to `path` that no other process uses."""
    return path.with_name(f"{path.name}.{os.getpid()}-{time.time_ns():x}.part")


def is_present(path: Path, content: Content) -> bool:
    """Whether `path` is a file of the right size; its bytes are not read."""
    with contextlib.suppress(OSError):
        return path.is_file() and path.stat().st_size == content.size_bytes
    return False


def is_sound(path: Path, content: Content, stamp: Path, report: Report | None) -> bool:
    """Whether `path` has `content`: the size is checked always, the hash once per size and time."""
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
    """The digest of a file's bytes, of the same kind as in `content`."""
    hasher = content.hasher()
    done = 0
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            hasher.update(chunk)
            done += len(chunk)
            if report is not None:
                report(f"Checking {path.name}", done, content.size_bytes)
    return hasher.hexdigest()
