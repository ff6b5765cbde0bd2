"""Download of a hub model into the cache: resumable, hash-checked, one process at a time.

Importing this needs the extra `hub`; `loader/hub.py` reports that the extra is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from tiercel import env
from tiercel.errors import ModelNotFoundError
from tiercel.loader import store
from tiercel.loader.hub_client import Body, ConnectionLostError, HubClient, Listing
from tiercel.loader.hub_folder import HubFolder
from tiercel.loader.hub_names import (
    HubName,
    RemoteFile,
    select,
    select_matching,
    show,
)
from tiercel.loader.store import Content, Report

RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0)  # between attempts that brought no new byte

_Open = Callable[[int], contextlib.AbstractContextManager[Body]]


def list_remote(name: HubName, revision: str) -> Listing:
    """The list of a repository's files on the hub.

    Raises:
        ModelNotFoundError: the hub refuses or cannot be reached.
    """
    client = HubClient(env.hub_endpoint())
    delays = iter(RETRY_DELAYS_S[:2])
    while True:
        try:
            return client.list_files(name, revision)
        except ConnectionLostError as error:
            _wait(delays, name, error)


def pull(name: HubName, revision: str, *, pattern: str | None, report: Report | None) -> Path:
    """Download a model, or the files of it that have changed.

    Args:
        name: the repository and the choice in it.
        revision: branch, tag or commit.
        pattern: download the files that match it instead.
        report: called with (what, done, total) in bytes.

    Returns:
        The file to open, or the folder.

    Raises:
        ModelNotFoundError: the hub refuses or cannot be reached, a name or a hash is wrong, or the
            files cannot be stored.
    """
    folder = HubFolder(name, revision)
    if report is not None:
        report(f"Asking the hub for {name.repository}", 0, 0)
    listing = list_remote(name, revision)
    if pattern is not None:
        selection = select_matching(listing.files, pattern, name.repository)
    else:
        selection = select(listing.files, name)
    client = HubClient(env.hub_endpoint())
    with _storing(folder), folder.locked(report) as is_alone:
        missing = [file for file in selection.files if not folder.is_sound(file, report)]
        parts = [_part_path(folder, file, is_alone) for file in missing]
        _check_space(folder, missing, parts)
        reports = _joined(report, name, missing)
        for file, part, report_file in zip(missing, parts, reports, strict=True):
            path = folder.path(file.name)
            path.parent.mkdir(parents=True, exist_ok=True)

            def opened(
                start: int, file: RemoteFile = file
            ) -> contextlib.AbstractContextManager[Body]:
                return client.file(name, listing.commit, file, start)

            try:
                _fetch(opened, name, file, part, report_file)
                part.replace(path)
            finally:
                if not is_alone:
                    part.unlink(missing_ok=True)
            folder.is_sound(file, None)  # writes the stamp
        folder.write_listing(listing.commit, listing.files)
    return folder.path(selection.entry)


def _joined(
    report: Report | None, name: HubName, files: Sequence[RemoteFile]
) -> list[Report | None]:
    """Progress callback for one of several files: bytes count as those of a single download."""
    if report is None or len(files) < 2:
        return [report] * len(files)
    total = sum(file.content.size_bytes for file in files)
    what = f"Fetching {len(files)} files of {name.repository} ({total / 1e6:.0f} MB)"
    reports: list[Report | None] = []
    before = 0
    for file in files:
        reports.append(partial(_report_part, report, what, before, total))
        before += file.content.size_bytes
    return reports


def _report_part(
    report: Report, what: str, before: int, total: int, _part: str, done: int, _size: int
) -> None:
    report(what, before + done, total)


def _part_path(folder: HubFolder, file: RemoteFile, is_alone: bool) -> Path:
    """Path of a growing file; without a lock, a path that no other process uses."""
    part = folder.state / f"{file.content.digest}.part"
    return part if is_alone else store.part_path(part)


def _fetch(
    opened: _Open, name: HubName, file: RemoteFile, part: Path, report: Report | None
) -> None:
    """Download into `part` until the file is complete; resumes where an earlier attempt ended.

    A resumed file with a wrong hash is downloaded once more from its start: the old
    bytes may have been damaged.
    """
    is_continued = _size_of(part) > 0
    while not _try_fetch(opened, name, file, part, report):
        part.unlink(missing_ok=True)
        if not is_continued:
            raise ModelNotFoundError(
                f"{name.repository}: {show(file.name)} came with another hash than the hub names.",
                hint="Run it again; if that does not help, do not use this repository.",
            )
        is_continued = False


def _try_fetch(
    opened: _Open, name: HubName, file: RemoteFile, part: Path, report: Report | None
) -> bool:
    """Download the missing bytes of a file; returns whether the hash of the whole file is right."""
    with _PartFile(part, file.content) as target:
        delays = iter(RETRY_DELAYS_S)
        farthest = target.num_bytes
        while target.num_bytes < file.content.size_bytes:
            error = _receive(opened, file, target, report)
            if target.num_bytes >= file.content.size_bytes:
                break
            if target.num_bytes > farthest:  # bytes from before a restart do not count again
                farthest = target.num_bytes
                delays = iter(RETRY_DELAYS_S)
            _wait(delays, name, error or ConnectionLostError("the connection ended early"))
        return target.is_right()


def _receive(
    opened: _Open, file: RemoteFile, target: _PartFile, report: Report | None
) -> ConnectionLostError | None:
    """Append the bytes of one connection; returns the error that ended it, if any."""
    size_bytes = file.content.size_bytes
    what = f"Fetching {file.name} ({size_bytes / 1e6:.0f} MB)"
    try:
        with opened(target.num_bytes) as body:
            if body.start != target.num_bytes:
                target.restart()
            for chunk in body.chunks:
                target.append(chunk)
                if report is not None:
                    report(what, min(target.num_bytes, size_bytes), size_bytes)
                if target.num_bytes > size_bytes:
                    break
    except ConnectionLostError as error:
        return error
    return None


class _PartFile:
    """A file that grows under its temporary name and is hashed while it grows."""

    def __init__(self, path: Path, content: Content) -> None:
        self._content = content
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        self._stream = os.fdopen(os.open(path, flags, 0o644), "r+b")
        self._hasher = content.hasher()
        self.num_bytes = 0

    def __enter__(self) -> Self:
        while chunk := self._stream.read(store.CHUNK_BYTES):
            self._hasher.update(chunk)
            self.num_bytes += len(chunk)
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def append(self, chunk: bytes) -> None:
        self._stream.write(chunk)
        self._hasher.update(chunk)
        self.num_bytes += len(chunk)

    def restart(self) -> None:
        """Drop the bytes so far."""
        self._stream.seek(0)
        self._stream.truncate()
        self._hasher = self._content.hasher()
        self.num_bytes = 0

    def is_right(self) -> bool:
        """Whether the file is complete, flushed to the disk, and has the right hash."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        is_whole = self.num_bytes == self._content.size_bytes
        return is_whole and self._hasher.hexdigest() == self._content.digest


def _wait(delays: Iterator[float], name: HubName, error: ConnectionLostError) -> None:
    """Pause before the next attempt.

    Raises:
        ModelNotFoundError: there were enough attempts.
    """
    delay_s = next(delays, None)
    if delay_s is None:
        raise ModelNotFoundError(
            f"{name.repository}: the hub cannot be reached: {show(str(error))}.",
            hint="Check the network and run it again: a download resumes where it ended.",
        ) from error
    time.sleep(delay_s)


def _check_space(folder: HubFolder, files: Sequence[RemoteFile], parts: Sequence[Path]) -> None:
    needed = sum(file.content.size_bytes for file in files) - sum(map(_size_of, parts))
    if shutil.disk_usage(folder.state).free < needed:
        raise _disk_full(folder, f"; {needed / 1e6:.0f} MB are missing")


def _size_of(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _disk_full(folder: HubFolder, more: str = "") -> ModelNotFoundError:
    return ModelNotFoundError(
        f"{folder.name.repository}: the disk of {folder.top} is full{more}.",
        hint="Free some space and run it again, or set TIERCEL_CACHE to a folder elsewhere.",
    )


@contextlib.contextmanager
def _storing(folder: HubFolder) -> Iterator[None]:
    """Turn errors of the disk into one-line errors."""
    try:
        yield
    except OSError as error:
        if error.errno in store.FULL:
            raise _disk_full(folder) from error
        raise ModelNotFoundError(
            f"{folder.name.repository}: the model cannot be stored in {folder.top}: "
            f"{error.strerror or error}.",
            hint="Set TIERCEL_CACHE to a folder that can be written.",
        ) from error
