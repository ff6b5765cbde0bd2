"""`tiercel pull`: download a model into the cache; list or remove the models in it.

Standard output carries the path of the model, so that a script can use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from tiercel.cli.options import CommonOptions
from tiercel.cli.terminal import ProgressReporter, UsageError, note, write

if TYPE_CHECKING:
    from tiercel.loader.hub_names import HubName, RemoteFile

_GROUP = Group("Model", sort_key=1)


def pull(
    name: Annotated[
        str | None,
        Parameter(group=_GROUP, help="Catalogue name, owner/name or owner/name:Q4_K_M."),
    ] = None,
    /,
    *,
    revision: Annotated[
        str | None, Parameter(group=_GROUP, help="Branch, tag or commit [main].")
    ] = None,
    file: Annotated[
        str | None, Parameter(group=_GROUP, help="Download the files that match this pattern.")
    ] = None,
    is_list: Annotated[
        bool,
        Parameter(name="--list", group=_GROUP, help="List the files; without NAME, the cache."),
    ] = False,
    rm: Annotated[bool, Parameter(group=_GROUP, help="Remove the model from the cache.")] = False,
    offline: Annotated[bool, Parameter(group=_GROUP, help="Never download.")] = False,
    common: CommonOptions = CommonOptions(),  # noqa: B008 - frozen
) -> int:
    """Download a model into the cache; an interrupted download resumes."""
    from tiercel.loader import hub, hub_names

    if is_list + rm + (file is not None) > 1:
        raise UsageError("--list, --rm and --file exclude each other.", hint="Give one of them.")
    if name is None:
        if not is_list:
            raise UsageError("NAME: none was given.", hint="Give one, or --list for the cache.")
        _list_cache()
        return 0
    hub_name = hub.hub_name(name)
    if hub_name is None and (revision is not None or file is not None):
        raise UsageError(
            "--revision and --file are for models of a hub.", hint="Give a name like owner/name."
        )
    with ProgressReporter(is_quiet=common.quiet) as report:
        if rm:
            num_bytes = hub.remove(name, revision=revision, report=report)
            note(f"Removed {_size(num_bytes)}.")
        elif is_list and hub_name is not None:
            _list_repository(hub_name, revision or hub_names.DEFAULT_REVISION, offline=offline)
        elif is_list:
            write(f"{hub.resolve(name, offline=True, report=report)}\n")
        else:
            path = hub.pull(
                name,
                revision=revision or hub_names.DEFAULT_REVISION,
                pattern=file,
                offline=offline,
                report=report,
            )
            report.close()
            write(f"{path}\n")
    return 0


def _list_cache() -> None:
    """Print one row for each file of the cache: its size and its name for other commands."""
    from tiercel import env
    from tiercel.loader import hub, hub_folder, hub_names, store

    folder = env.cache_dir() / "models"
    for entry in hub.CATALOGUE:
        if store.is_present(folder / entry.file_name, entry.content):
            _write_row(entry.size_bytes, entry.name, entry.file_name)
    for model in hub_folder.list_cached():
        is_default = model.revision == hub_names.DEFAULT_REVISION
        title = model.repository if is_default else f"{model.repository} at {model.revision}"
        for file in model.files:
            _write_row(file.content.size_bytes, title, file.name)


def _list_repository(name: HubName, revision: str, *, offline: bool) -> None:
    """Print one row for each file on the hub; those in the cache are marked."""
    from tiercel.loader import hub, hub_folder

    folder = hub_folder.HubFolder(name, revision)
    files: tuple[RemoteFile, ...] = hub.list_files(name, revision, offline=offline)
    for file in files:
        _write_row(file.content.size_bytes, "cached" if folder.has(file) else "", file.name)


def _write_row(size_bytes: int, what: str, name: str) -> None:
    from tiercel.loader.hub_names import show

    write(f"{_size(size_bytes):>9}  {what:<8}  {show(name)}\n")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"
