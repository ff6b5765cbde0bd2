"""Names on a model hub: their syntax, and the files of a repository that they select.

`owner/name` is a repository, `owner/name:CHOICE` one GGUF file in it, by its name or by its
quantisation (`Q4_K_M`). Both the user's text and the repository's list of files are untrusted: a
name becomes a path only after `check_file_name`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct

from tiercel.errors import ModelNotFoundError
from tiercel.loader.safetensors import PICKLE_SUFFIXES
from tiercel.loader.store import Content

DEFAULT_QUANTISATION = "Q4_K_M"  # among several files: small, and close to the float weights
DEFAULT_REVISION = "main"

_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95})/([A-Za-z0-9][\w.-]{0,95})(?::(.{1,255}))?", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,127}", re.ASCII)
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_BESIDE_THE_MODEL = ("mmproj", "imatrix")  # GGUF files without a language model
_FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
_MAX_COMPONENT_BYTES = 200  # file systems allow 255; a suffix of ours must fit
_MAX_LISTED = 12  # most names in a message
_MAX_SHOWN = 120  # most characters of a name in a message


class HubName(Struct, frozen=True):
    """A checked name: `owner` and `name` are safe as folders.

    Attributes:
        choice: file name or quantisation; None leaves the choice to `select`.
    """

    owner: str
    name: str
    choice: str | None = None

    @property
    def repository(self) -> str:
        """`owner/name`."""
        return f"{self.owner}/{self.name}"


class RemoteFile(Struct, frozen=True):
    """A file of a repository: its path there, unchecked, with size and digest."""

    name: str
    content: Content


class Selection(Struct, frozen=True):
    """The files to download.

    Attributes:
        files: all files of the model.
        entry: file to open; None for the folder with all files.
    """

    files: tuple[RemoteFile, ...]
    entry: str | None


def parse(text: str) -> HubName | None:
    """Parse the hub name in a model argument; None if it cannot be one."""
    found = _NAME.fullmatch(text)
    if found is None or ".." in text.partition(":")[0]:
        return None
    return HubName(*found.groups())


def check_revision(revision: str) -> None:
    """Refuse text that cannot be a branch, a tag or a commit.

    Raises:
        ModelNotFoundError: the text has other characters, or `..`.
    """
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ModelNotFoundError(
            f"{show(revision)}: not the name of a revision.",
            hint="Give a branch, a tag or a commit.",
        )


def check_file_name(name: str) -> None:
    """Refuse a repository's file name that leaves the model's folder or is not portable.

    Raises:
        ModelNotFoundError: it is absolute, or has `..`, a backslash, a colon or control characters.
    """
    parts = name.split("/")
    is_plain = name.isprintable() and not any(char in name for char in '\\:*?"<>|')
    is_inside = all(part not in ("", ".", "..") and not part.endswith((" ", ".")) for part in parts)
    is_short = all(len(part.encode(errors="replace")) <= _MAX_COMPONENT_BYTES for part in parts)
    if not (is_plain and is_inside and is_short and len(parts) <= 8):
        raise ModelNotFoundError(
            f"the repository holds a file named {show(name)}, which is not a safe name.",
            hint="Nothing was written. Do not use this repository.",
        )


def select(files: Sequence[RemoteFile], name: HubName) -> Selection:
    """Select the files of a repository that a name means.

    Of a repository with GGUF files one is selected, with all parts if it is split: the named
    file, else the only one, else the one in `DEFAULT_QUANTISATION`. Of another repository its
    safetensors folder is selected.

    Raises:
        ModelNotFoundError: no file matches, or several do.
    """
    groups = _gguf_groups(files)
    where = show(name.repository)
    if name.choice is not None:
        return _chosen(files, groups, name.choice, where)
    if len(groups) == 1:
        return _whole(next(iter(groups.values())), where)
    if groups:
        preferred = _by_quantisation(groups, DEFAULT_QUANTISATION)
        if len(preferred) == 1:
            return _whole(groups[preferred[0]], where)
        raise ModelNotFoundError(
            f"{where}: the repository holds {len(groups)} models: {_listed(groups)}.",
            hint=f"Name one: {where}:FILE, or its quantisation.",
        )
    return _folder(files, where)


def select_matching(files: Sequence[RemoteFile], pattern: str, where: str) -> Selection:
    """Select the files whose names match a shell pattern.

    Raises:
        ModelNotFoundError: no file matches, or a matching file is pickled.
    """
    found = tuple(file for file in files if fnmatchcase(file.name, pattern))
    if not found:
        raise ModelNotFoundError(
            f"{where}: no file matches {show(pattern)!r}.",
            hint=f"tiercel pull {where} --list shows the files.",
        )
    for file in found:
        if file.name.lower().endswith(PICKLE_SUFFIXES):
            raise _pickled(where, file.name)
    ggufs = _gguf_groups(found)
    is_one_model = len(ggufs) == 1 and len(next(iter(ggufs.values()))) == len(found)
    return Selection(found, min(file.name for file in found) if is_one_model else None)


def _gguf_groups(files: Iterable[RemoteFile]) -> dict[str, list[RemoteFile]]:
    """The models by name without ending; the parts of a split model are together."""
    groups: dict[str, list[RemoteFile]] = {}
    for file in files:
        lower = file.name.lower()
        if lower.endswith(".gguf") and not any(word in lower for word in _BESIDE_THE_MODEL):
            split = _SPLIT.fullmatch(file.name)
            groups.setdefault(split.group(1) if split else file.name[:-5], []).append(file)
    return groups


def _whole(group: list[RemoteFile], where: str) -> Selection:
    """All parts of a model, checked to be complete."""
    parts = sorted(group, key=lambda file: file.name)
    split = _SPLIT.fullmatch(parts[0].name)
    wanted = int(split.group(3)) if split else 1
    if len(parts) != wanted:
        raise ModelNotFoundError(
            f"{where}: {show(parts[0].name)} has {wanted} parts but the repository {len(parts)}.",
            hint="Name another file.",
        )
    return Selection(tuple(parts), parts[0].name)


def _chosen(
    files: Sequence[RemoteFile], groups: dict[str, list[RemoteFile]], choice: str, where: str
) -> Selection:
    for group in groups.values():
        if any(file.name == choice for file in group):
            return _whole(group, where)
    for file in files:
        if file.name == choice and choice.lower().endswith(PICKLE_SUFFIXES):
            raise _pickled(where, choice)
    found = _by_quantisation(groups, choice)
    if len(found) == 1:
        return _whole(groups[found[0]], where)
    if found:
        raise ModelNotFoundError(
            f"{where}: {show(choice)!r} fits {len(found)} files: {_listed(found)}.",
            hint="Write the name of one.",
        )
    there = f"It has {_listed(groups)}." if groups else "It holds no GGUF file."
    raise ModelNotFoundError(f"{where}: no GGUF file is {show(choice)!r}.", hint=there)


def _by_quantisation(groups: dict[str, list[RemoteFile]], tag: str) -> list[str]:
    """The models whose name contains `tag` as a separate word, in upper or lower case."""
    word = re.compile(rf"(?:^|[-./]){re.escape(tag)}(?:[-./]|$)", re.IGNORECASE)
    return [group for group in groups if word.search(group)]


def _folder(files: Sequence[RemoteFile], where: str) -> Selection:
    names = {file.name for file in files}
    shards = [n for n in names if n.endswith(".safetensors") and n.startswith("model")]
    if "config.json" in names and any("/" not in shard for shard in shards):
        wanted = {*_FOLDER_FILES, *(shard for shard in shards if "/" not in shard)}
        return Selection(tuple(file for file in files if file.name in wanted), None)
    pickled = [name for name in sorted(names) if name.lower().endswith(PICKLE_SUFFIXES)]
    if pickled:
        raise _pickled(where, pickled[0])
    raise ModelNotFoundError(
        f"{where}: the repository holds neither a GGUF file nor model.safetensors.",
        hint="Find a GGUF form of the model.",
    )


def _pickled(where: str, name: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"{where}: {show(name)} holds pickled weights, which can run code and are never fetched.",
        hint="Find a GGUF or safetensors form of the model.",
    )


def _listed(groups: Iterable[str]) -> str:
    names = sorted(groups)
    text = ", ".join(show(name) for name in names[:_MAX_LISTED])
    return f"{text} and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else text


def show(text: str) -> str:
    """A name for a message: one line, shortened, control characters escaped."""
    escaped = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: _MAX_SHOWN + 1])
    return escaped if len(escaped) <= _MAX_SHOWN else escaped[:_MAX_SHOWN] + "..."
