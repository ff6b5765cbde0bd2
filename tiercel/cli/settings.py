"""Sources of options besides the command line: `TIERCEL_<OPTION>`, then a TOML file.

An empty variable counts as unset, as it does for the switches of `env.py`. In the file a top-level
key is an option of any command. A table named like a command has options of that command only, and
takes precedence over the top level (`[bench.serve]` is the table of `bench serve`).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tiercel.cli.terminal import UsageError, read_bounded

if TYPE_CHECKING:
    from cyclopts import App, ArgumentCollection

MAX_CONFIG_BYTES = 1 << 20


def read_config(path: Path, options: Mapping[str, frozenset[str]]) -> dict[str, dict[str, Any]]:
    """Read a configuration file.

    Args:
        path: the TOML file.
        options: the option names of each command.

    Returns:
        The values for each command, by option name.

    Raises:
        UsageError: the file cannot be read, or has a key that is not an option.
    """
    everything: frozenset[str] = frozenset().union(*options.values())
    result: dict[str, dict[str, Any]] = {command: {} for command in options}
    values = _load(path)
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    for raw in values.keys() - tables.keys():
        key = _known(path, raw, raw, everything)
        for command, known in options.items():
            if key in known:
                result[command][key] = values[raw]
    for command, table in _command_tables(path, tables, frozenset(options)):
        for raw, value in table.items():
            key = _known(path, f"{command}.{raw}", raw, options[command])
            result[command][key] = value
    return result


def drop_empty_variables(
    _app: App, _commands: tuple[str, ...], arguments: ArgumentCollection
) -> None:
    """Drop options that come from empty environment variables."""
    for argument in arguments:
        argument.tokens[:] = [
            token for token in argument.tokens if token.source != "env" or token.value
        ]


def check_whole_numbers(
    _app: App, _commands: tuple[str, ...], arguments: ArgumentCollection
) -> None:
    """Refuse fractions for integer options, which cyclopts would round.

    Raises:
        UsageError: the message names the option and the value.
    """
    for argument in arguments:
        if argument.hint is not int and int not in get_args(argument.hint):
            continue
        for token in argument.tokens:
            if _is_fraction(token.value):
                raise UsageError(
                    f"{token.keyword}: {token.value!r:.40} is not a whole number.",
                    hint="Use an integer.",
                )


def _is_fraction(text: str) -> bool:
    try:
        return not float(text).is_integer()
    except ValueError:  # not a number, or a hexadecimal one: cyclopts decides
        return False


def _command_tables(
    path: Path, tables: Mapping[str, dict[str, Any]], commands: frozenset[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tables by command; a table of a group of commands contains tables itself."""
    groups = {command.partition(" ")[0] for command in commands if " " in command}
    for name, table in tables.items():
        if name in groups:
            inner = {f"{name} {k}": v for k, v in table.items() if isinstance(v, dict)}
            yield from _command_tables(path, inner, commands)
            table = {key: value for key, value in table.items() if not isinstance(value, dict)}
            if not table:
                continue
        _known(path, name, name, commands)
        yield name, table


def _load(path: Path) -> dict[str, Any]:
    try:
        data = read_bounded(path, MAX_CONFIG_BYTES)
        if data is None:
            raise UsageError(
                f"{path}: the configuration file is over {MAX_CONFIG_BYTES} bytes.",
                hint="Give a TOML file of options.",
            )
        return tomllib.loads(data.decode())
    except OSError as error:
        raise UsageError(
            f"{path}: the configuration file cannot be read: {error.strerror}.",
            hint="Give a TOML file of options.",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{path}: the configuration file is not TOML: {error!s:.120}.",
            hint="Write one option per line, for instance: temperature = 0.5",
        ) from error


def _known(path: Path, shown: str, raw: str, known: frozenset[str]) -> str:
    """The option's name as it is spelled on the command line."""
    key = raw.replace("_", "-")
    if key in known:
        return key
    nearest = difflib.get_close_matches(key, known, n=1)
    raise UsageError(
        f"{path}: {shown!r:.80} is not an option of the command line.",
        hint=f"Did you mean {nearest[0]}?" if nearest else "See tiercel COMMAND --help.",
    )
