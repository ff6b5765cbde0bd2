"""Hub models in the cache: their folders, their state, and their removal.

    models/hub/OWNER/NAME/REVISION/NAME/...           the files, as in the repository
    models/hub/OWNER/NAME/REVISION/.state/listing     the repository's list at the last download
                                         /lock
                                         /DIGEST.part a file that is not complete yet
                                         /HASH.ok     stamp of a file that was hashed

A file gets its final name when its hash is right. An interrupted download leaves a `.part` file of
the wanted content; the next download resumes it (`loader/hub_pull.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct

from tiercel import env
from tiercel.errors import ModelNotFoundError
from tiercel.loader import store
from tiercel.loader.hub_names import (
    DEFAULT_REVISION,
    HubName,
    RemoteFile,
    check_file_name,
    check_revision,
    select,
)
from tiercel.loader.store import Content, Report

MAX_LISTING_BYTES = 16 << 20
WAIT_FOR_EVER = -1.0  # the lock of a process that died is free
_STATE = ".state"  # a repository's name never begins with a dot


class _Listing(msgspec.Struct):
    """The file `listing`: name, size and digest of each file of the repository."""

    commit: str
    files: list[tuple[str, int, str]]


class CachedModel(Struct, frozen=True):
    """The complete files of a repository at a revision in the cache."""

    repository: str
    revision: str
    files: tuple[RemoteFile, ...]


class HubFolder:
    """The folder of one repository at one revision; it may not exist."""

    def __init__(self, name: HubName, revision: str = DEFAULT_REVISION) -> None:
        """Set the folder's path.

        Raises:
            ModelNotFoundError: the revision is not a valid name.
        """
        check_revision(revision)
        self.name = name
        self.revision = revision
        self.top = _root() / name.owner / name.name / quote(revision, safe="")
        self.state = self.top / _STATE

    def read_listing(self) -> tuple[RemoteFile, ...]:
        """The repository's files at the last download; empty if it was never downloaded."""
        path = self.state / "listing"
        try:
            if path.stat().st_size > MAX_LISTING_BYTES:
                return ()
            listing = msgspec.json.decode(path.read_bytes(), type=_Listing)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return ()  # absent or damaged: it is downloaded again
        return tuple(
            RemoteFile(name, Content(size, digest)) for name, size, digest in listing.files
        )

    def write_listing(self, commit: str, files: Iterable[RemoteFile]) -> None:
        """Store the list of the repository's files."""
        rows = [(file.name, file.content.size_bytes, file.content.digest) for file in files]
        path = self.state / "listing"
        part = store.part_path(path)
        part.write_bytes(msgspec.json.encode(_Listing(commit, rows)))
        part.replace(path)

    def path(self, file: str | None) -> Path:
        """Path of a file of the repository, or of the folder of all; no part of it is a link.

        Raises:
            ModelNotFoundError: the name is not safe, or there is a link in the cache.
        """
        path = self.top / self.name.name
        if file is not None:
            check_file_name(file)
            path = path / file
        for below in [path, *path.parents[: len(path.parts) - len(_root().parts) - 1]]:
            if below.is_symlink():
                raise ModelNotFoundError(
                    f"{below}: the cache holds a link, which is not followed.", hint="Remove it."
                )
        return path

    def has(self, file: RemoteFile) -> bool:
        """Whether a file of the right size is in the cache; its bytes are not read."""
        try:
            return store.is_present(self.path(file.name), file.content)
        except ModelNotFoundError:
            return False  # a file of such a name is never downloaded

    def is_sound(self, file: RemoteFile, report: Report | None) -> bool:
        """Whether the file is in the cache and complete."""
        stamp = self.state / f"{hashlib.sha256(file.name.encode()).hexdigest()[:32]}.ok"
        return store.is_sound(self.path(file.name), file.content, stamp, report)

    @contextlib.contextmanager
    def locked(self, report: Report | None) -> Iterator[bool]:
        """Lock out other processes; yields False where the file system has no locks."""
        self.state.mkdir(parents=True, exist_ok=True)
        with store.locked(self.state / "lock", report, WAIT_FOR_EVER) as is_alone:
            yield is_alone


def list_cached() -> Iterator[CachedModel]:
    """The hub models in the cache, by name."""
    for state in sorted(_root().glob(f"*/*/*/{_STATE}")):
        owner, name, revision = state.parts[-4:-1]
        folder = HubFolder(HubName(owner, name), unquote(revision))
        files = tuple(file for file in folder.read_listing() if folder.has(file))
        yield CachedModel(folder.name.repository, folder.revision, files)


def remove(name: HubName, revision: str | None, report: Report | None) -> int:
    """Remove a repository from the cache, at one revision or at all, or the chosen file of it.

    Returns:
        The number of bytes of the removed files.

    Raises:
        ModelNotFoundError: it is not in the cache, or cannot be removed.
    """
    if revision is not None:
        tops = [HubFolder(name, revision).top]
    else:
        tops = sorted((_root() / name.owner / name.name).glob("*"))
    num_bytes = 0
    for top in tops:
        if top.is_dir() and not top.is_symlink():
            folder = HubFolder(name, unquote(top.name))
            with _removing(top), folder.locked(report):
                num_bytes += _remove_files(folder)
    if num_bytes == 0:
        raise ModelNotFoundError(
            f"{name.repository}: the cache holds nothing of it.",
            hint="tiercel pull --list shows what it holds.",
        )
    for parent in (_root() / name.owner / name.name, _root() / name.owner):
        with contextlib.suppress(OSError):  # other revisions, other repositories
            parent.rmdir()
    return num_bytes


def _remove_files(folder: HubFolder) -> int:
    """Remove the folder, or the file that the name selects; returns the number of bytes."""
    if folder.name.choice is None:
        num_bytes = sum(path.stat().st_size for path in folder.top.rglob("*") if path.is_file())
        shutil.rmtree(folder.path(None), ignore_errors=True)
        shutil.rmtree(folder.top)
        return num_bytes
    num_bytes = 0
    for file in select(folder.read_listing(), folder.name).files:
        for path in (folder.path(file.name), folder.state / f"{file.content.digest}.part"):
            with contextlib.suppress(FileNotFoundError):
                size = path.stat().st_size
                path.unlink()
                num_bytes += size
    return num_bytes


@contextlib.contextmanager
def _removing(top: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelNotFoundError(
            f"{top}: the folder cannot be removed: {error.strerror or error}.",
            hint="Check who may write there.",
        ) from error


def _root() -> Path:
    return env.cache_dir().absolute() / "models" / "hub"
