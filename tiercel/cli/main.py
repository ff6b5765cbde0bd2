"""The command line: finds the command, runs it, and turns every error into one line and a status.

Nothing here or in the command modules imports PyTorch at the top: help and usage errors are fast.
Status: 0 done, 1 failed, 2 wrong use, 70 `serve` gave up its engine, 130 Ctrl-C, 141 the program
that reads the output closed the pipe, 143 SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Dict, Env

from tiercel import env
from tiercel.cli.help import CompactFormatter
from tiercel.cli.options import CommonOptions
from tiercel.cli.settings import check_whole_numbers, drop_empty_variables, read_config
from tiercel.cli.terminal import (
    UsageError,
    exit_on_sigterm,
    mend_standard_streams,
    note,
    say,
    say_os_error,
    show_log,
    silence_stdout,
)
from tiercel.cli.wrong_use import describe_wrong_use
from tiercel.errors import InstallationError, TiercelError
from tiercel.version import __version__

_ENVIRONMENT = Env("TIERCEL_", command=False)
_CUDA_LINE = re.compile(r"^cuda\b[^=]*= *'([^']+)'", re.MULTILINE)

# Where the function of each command is: a command imports none of the others.
_COMMANDS = {
    "generate": "tiercel.cli.generate:generate",
    "chat": "tiercel.cli.chat:chat",
    "serve": "tiercel.cli.serve:serve",
    "score": "tiercel.cli.score:score",
    "inspect": "tiercel.cli.inspect:inspect_model",
    "pull": "tiercel.cli.pull:pull",
    "convert": "tiercel.cli.convert:convert",
    "bench serve": "tiercel.cli.bench_serve:bench_serve",
    "bench throughput": "tiercel.cli.bench_throughput:bench_throughput",
    "bench speed": "tiercel.cli.bench_speed:bench_speed",
    "bench kernels": "tiercel.cli.bench_kernels:bench_kernels",
    "doctor": "tiercel.cli.doctor:doctor",
}
_GROUPS = {"bench": "Measure the speed of a server or of the engine; default: bench speed."}
_DEFAULTS = {"bench": "speed"}  # the default command of a group
_COMMON_FLAGS = frozenset({"--verbose", "-v", "--quiet", "-q"})  # of CommonOptions, like --config
_HELP = """Run language models from GGUF files and model folders, on CPU and CUDA.

Options of every command, before or after its name:
  --config PATH  TOML file of options; flags override it.
  -v, --verbose  Say more; show tracebacks.
  -q, --quiet    Only results and errors."""
_COMMON = "Also --config PATH, -v and -q, as for every command: see tiercel --help."
_EXAMPLES = {
    "tiercel": (
        'tiercel generate "The capital of France is" --max-tokens 8',
        'tiercel chat model.gguf --system "Answer in one sentence."',
    ),
    "generate": (
        'tiercel generate "The capital of France is" --max-tokens 8 --temperature 0',
        "tiercel generate --file notes.txt -m model.gguf --chat --json",
    ),
    "chat": (
        "tiercel chat",
        'tiercel chat model.gguf --system "Answer in one sentence." --save talk.json',
    ),
    "serve": ("tiercel serve", "tiercel serve model.gguf --port 0 --api-key-file keys.txt"),
    "score": (
        'tiercel score --query "Is this a fruit? " --items words.txt --labels " Yes, No"'
        " --normalize labels",
        "tiercel score --file lists.jsonl --labels Yes,No --normalize labels > scores.jsonl",
    ),
    "inspect": ("tiercel inspect model.gguf", "tiercel inspect model.gguf --verify --json"),
    "pull": (
        "tiercel pull owner/name:Q4_K_M",
        "tiercel pull owner/name --list",
    ),
    "convert": (
        "tiercel convert DeepSeek-V4-Flash DeepSeek-V4-Flash-NVFP4",
        "tiercel convert DeepSeek-V4-Flash DeepSeek-V4-Flash-NVFP4 --max-error 0 --force",
    ),
    "bench": (
        "tiercel bench -m model.gguf --json out.json",
        "tiercel bench serve http://127.0.0.1:8000 --concurrency 1,2,4 --json out.json",
    ),
    "bench serve": (
        "tiercel bench serve http://127.0.0.1:8000 --concurrency 1,4,16 --plot out.svg",
        "tiercel bench serve --compare before.json after.json",
    ),
    "bench throughput": (
        "tiercel bench throughput -m model.gguf --concurrency 64 --json out.json",
        "tiercel bench throughput --input-len 128:1024 --output-len 64 --requests 100",
    ),
    "bench speed": (
        "tiercel bench speed -m model.gguf --prompt 512,4096 --depth 0,8192",
        "tiercel bench speed --prompt 0 --batch 8,64 --json out.json",
    ),
    "bench kernels": (
        "tiercel bench kernels -m model.gguf --tokens 1,16,512 --decode 1x8192,64x512",
        "tiercel bench kernels --json out.json --plot out.svg",
    ),
    "doctor": ("tiercel doctor", "tiercel doctor --json"),
}
# What the numbers of a request depend on; docs/models.md, "Equal bits".
_NOTES = {
    "serve": (
        "On an H100 or H200 a lone request may have activations of 8 bits, several have 16, so an",
        "answer may change when others arrive; TIERCEL_EXACT=1 gives equal bits, slower.",
    )
}


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line.

    Returns:
        The exit status.
    """
    mend_standard_streams()
    exit_on_sigterm()
    common = CommonOptions()
    try:
        command, bound = _parse(arguments)
        common = next((v for v in bound.arguments.values() if isinstance(v, CommonOptions)), common)
        _set_up_messages(common)
        if not common.quiet:
            _warn_of_variables()
        status = command(*bound.args, **bound.kwargs)
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
        return 141
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            note("")  # the shell's prompt starts on its own line
        return 130
    except Exception as error:  # noqa: BLE001 - the last handler: no error may end in a traceback
        return _report(error, is_verbose=common.verbose)
    return status if isinstance(status, int) else 0


def make_app() -> App:
    """Make the cyclopts app with all commands."""
    app = App(
        name="tiercel",
        help=_HELP,
        help_epilogue=_epilogue("tiercel"),
        version=_version,
        help_formatter=CompactFormatter(),
        default_parameter=Parameter(negative="", show_env_var=False),
        config=(_ENVIRONMENT, drop_empty_variables, check_whole_numbers),
        help_format="plaintext",
        version_format="plaintext",
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
    )
    groups = {
        name: App(name=name, help=text, help_epilogue=_epilogue(name))
        for name, text in _GROUPS.items()
    }
    for group in groups.values():
        app.command(group)
    for name, command in _COMMANDS.items():
        in_group, _, last = name.rpartition(" ")
        owner = groups.get(in_group, app)
        owner.command(command, name=last, help_epilogue=_epilogue(name))
    app.register_install_completion_command(
        add_to_startup=False, help="Install tab completion for bash, zsh or fish."
    )
    return app


def _epilogue(name: str) -> str:
    notes = [*_NOTES[name], ""] if name in _NOTES else []
    common = [_COMMON, ""] if name in _COMMANDS else []
    examples = (f"  {line}" for line in _EXAMPLES[name])
    return "\n".join([*notes, *common, "Examples:", *examples])


def _parse(arguments: Sequence[str]) -> tuple[Callable[..., Any], inspect.BoundArguments]:
    """Bind the arguments; if they name a configuration file, read it and bind them again."""
    arguments = _name_command(arguments)
    app = make_app()
    command, bound, _ = app.parse_args(arguments)
    if _import_path(command) not in _COMMANDS.values():  # help, or the version
        from tiercel.cli.console import HelpConsole

        bound.arguments["console"] = HelpConsole()
        for name in _COMMANDS:
            _command_app(app, name)  # imports it: its docstring is its line in the list
        return command, bound
    common = next((v for v in bound.arguments.values() if isinstance(v, CommonOptions)), None)
    if common is None or common.config is None:
        return command, bound
    values = read_config(common.config, {name: _option_names(app, name) for name in _COMMANDS})
    name = next(name for name, path in _COMMANDS.items() if path == _import_path(command))
    source = Dict(values[name], use_commands_as_keys=False, source=str(common.config))
    app.config = (_ENVIRONMENT, drop_empty_variables, source, check_whole_numbers)
    command, bound, _ = app.parse_args(arguments)
    return command, bound


def _import_path(command: Callable[..., Any]) -> str:
    return f"{command.__module__}:{command.__qualname__}"


def _name_command(arguments: Sequence[str]) -> Sequence[str]:
    """Put the command first, followed by the options of every command that were before it.

    A group that is called alone or with options only runs its default command.
    """
    common, rest = _split_common(arguments)
    if not rest or (rest[0] not in _COMMANDS and rest[0] not in _GROUPS):
        return rest  # help, the version, or an unknown command
    names, rest = [rest[0]], rest[1:]
    if names[0] in _GROUPS:
        more, rest = _split_common(rest)
        common = [*common, *more]
        if not rest or (rest[0].startswith("-") and rest[0] not in ("--help", "-h")):
            names.append(_DEFAULTS[names[0]])
        elif f"{names[0]} {rest[0]}" in _COMMANDS:
            names, rest = [*names, rest[0]], rest[1:]
        else:
            common = []  # help of the group, or an unknown command
    return [*names, *common, *rest]


def _split_common(arguments: Sequence[str]) -> tuple[list[str], Sequence[str]]:
    """Split off the leading options that every command has."""
    end = 0
    while end < len(arguments):
        if arguments[end] in _COMMON_FLAGS or arguments[end].startswith("--config="):
            end += 1
        elif arguments[end] == "--config":
            end += 2
        else:
            break
    return list(arguments[:end]), arguments[end:]


def _command_app(app: App, command: str) -> App:
    for name in command.split():
        app = app[name]
    return app


def _option_names(app: App, command: str) -> frozenset[str]:
    arguments = _command_app(app, command).assemble_argument_collection()
    names = {name[2:] for argument in arguments for name in argument.names if name[:2] == "--"}
    return frozenset(names - {"config"})


def _set_up_messages(common: CommonOptions) -> None:
    show_log(is_verbose=common.verbose, is_quiet=common.quiet)
    if not common.verbose:
        warnings.simplefilter("ignore")  # warnings of other libraries are for programmers


def _warn_of_variables() -> None:
    """Warn of the `TIERCEL_` variables that no command reads."""
    if not env.unknown_variables(()):
        return
    app = make_app()
    names = {name for command in _COMMANDS for name in _option_names(app, command)}
    options = {f"TIERCEL_{name.upper().replace('-', '_')}" for name in names | {"config"}}
    found = [(name, env.nearest_variable(name, options)) for name in env.unknown_variables(options)]
    if found:
        told = [f"{name} ({near}?)" if near else name for name, near in found]
        say("warning", f"set, but read by no command: {', '.join(told)}.")


def _report(error: Exception, *, is_verbose: bool) -> int:
    """Print in one line what went wrong; returns the exit status."""
    if is_verbose:
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exception(error)
    if isinstance(error, ModuleNotFoundError):
        error = InstallationError.of(error)
    hint = getattr(error, "hint", "")
    if isinstance(error, UsageError):
        say("error", str(error), hint)
        return 2
    if isinstance(error, CycloptsError):
        say("error", *describe_wrong_use(error))
        return 2
    if isinstance(error, TiercelError):
        say("error", str(error), hint)
    elif isinstance(error, MemoryError):
        say("error", "out of memory: this machine has too little.", "Use a smaller model.")
    elif isinstance(error, OSError):
        say_os_error(error)
        if error.filename is None:
            silence_stdout()  # a full disk at standard output fails again at exit
    else:
        say(
            "error",
            f"internal error: {type(error).__name__}: {error!s:.300}",
            "Run the command with --verbose for the traceback.",
        )
    return 1


def _version() -> str:
    lines = [f"tiercel {__version__}"]
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return f"{lines[0]}\ntorch not installed"
    lines.append(f"torch {torch.version}")
    cuda = None
    with contextlib.suppress(OSError):  # read as text: importing PyTorch takes seconds
        cuda = _CUDA_LINE.search(torch.locate_file("torch/version.py").read_text())
    lines.append(f"CUDA {cuda.group(1)}" if cuda else "CUDA none (CPU build of torch)")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
