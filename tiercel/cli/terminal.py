"""Terminal output that the commands share: messages, progress, interrupts, safe text.

Results go to standard output, everything else to standard error; bars and colour appear only where
standard error is a terminal and NO_COLOR is unset.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tiercel.errors import ArgumentError

_PROMPT_SHOWN_AFTER_S = 1.0
_STAGE_SHOWN_AFTER_S = 1.0  # without a terminal, a stage is named only when it takes this long
# Control characters except tab and newline: a model's text must not control the terminal.
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


class UsageError(Exception):
    """A wrong use of the command line that only the command itself can detect: exit code 2."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def mend_standard_streams() -> None:
    """Reopen closed standard streams on the null device, so that later reads and writes work."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # a file opened later must not become standard output by accident
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # characters outside the encoding become '?'
            stream.reconfigure(errors="replace")


def silence_stdout() -> None:
    """Point standard output to the null device, so that the flush at exit cannot fail again."""
    with contextlib.suppress(OSError, ValueError):
        target = os.open(os.devnull, os.O_WRONLY)
        os.dup2(target, sys.stdout.fileno())
        os.close(target)


def read_bounded(path: Path, limit: int) -> bytes | None:
    """A file's bytes, or None if it has more than `limit`: a device or a pipe may never end.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as stream:
        data = stream.read(limit + 1)
    return None if len(data) > limit else data


def check_utf8(what: str, text: str, kind: type[UsageError | ArgumentError]) -> None:
    """Refuse bytes of a command line, terminal or pipe that Python turned into surrogates.

    Raises:
        UsageError, ArgumentError: an error of class `kind` that names `what`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise kind(
            f"{what}: character {error.start} is not valid UTF-8.", hint="Write it in UTF-8."
        ) from error


def has_colour() -> bool:
    """Whether standard error supports colour and progress bars."""
    if not sys.stderr.isatty():
        return False
    from rich.console import Console

    console = Console(stderr=True)  # knows NO_COLOR and TERM
    return console.is_terminal and not console.no_color and not console.is_dumb_terminal


def one_line(text: str) -> str:
    """A message as one printable line."""
    return "".join(c if c.isprintable() else " " if c in "\n\t" else ascii(c)[1:-1] for c in text)


def say(kind: str, message: str, hint: str = "") -> None:
    """Print `kind: message hint` as one line on standard error; a broken stream is ignored."""
    text = one_line(f"{message} {hint}".strip())
    label = f"\x1b[1;31m{kind}:\x1b[0m" if kind == "error" and has_colour() else f"{kind}:"
    with contextlib.suppress(OSError, ValueError):
        print(f"{label} {text}", file=sys.stderr, flush=True)


def say_os_error(error: OSError) -> None:
    """Print an error of a file, pipe or disk in the form of other errors."""
    where = f"{error.filename}: " if error.filename else "input or output: "
    say("error", f"{where}{error.strerror or error}.", "Check the path and the disk.")


def note(text: str) -> None:
    """Print a line for the user on standard error."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Write a piece of a result to standard output and flush it."""
    if sys.stdout.isatty():
        text = text.translate(_CONTROL)
    sys.stdout.write(text)
    sys.stdout.flush()


class _Messages(logging.Handler):
    """Logging handler that prints the package's log records as lines for the user."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.levelname.lower(), record.getMessage())


def show_log(*, is_verbose: bool, is_quiet: bool) -> None:
    """Send the package's warnings, and its notes if `is_verbose`, to standard error."""
    logger = logging.getLogger("tiercel")
    logger.handlers = [_Messages()]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if is_verbose else logging.ERROR if is_quiet else logging.WARNING)


class ProgressReporter:
    """Progress as (what, done, total): a bar on a terminal, else one line per long stage."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._has_bar = not is_quiet and has_colour()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._started_s = 0.0
        self._is_told = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        """Report progress; the caller chooses the unit."""
        if self._is_quiet:
            return
        if what != self._stage:
            self.close()
            self._stage = what
            self._started_s = time.perf_counter()
            self._is_told = False
        if self._has_bar:
            self._update_bar(what, done, total)
        elif not self._is_told and time.perf_counter() - self._started_s > _STAGE_SHOWN_AFTER_S:
            note(f"{one_line(what)} ...")
            self._is_told = True

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None
        self._task = None

    def _update_bar(self, what: str, done: int, total: int) -> None:
        if self._bar is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(one_line(what), total=total or None)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total or None)


class PromptLine:
    """Progress of a long prompt on a terminal, in one line that is erased at the end."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_shown = not is_quiet and sys.stderr.isatty()
        self._started_s = time.perf_counter()
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.erase()

    def __call__(self, done: int, total: int) -> None:
        """Report how many of all tokens are computed."""
        if self._is_shown and time.perf_counter() - self._started_s > _PROMPT_SHOWN_AFTER_S:
            text = f"reading prompt, {100 * done // total}%"
            self._print(f"\r{text}")
            self._width = len(text)

    def erase(self) -> None:
        """Remove the line: later text begins in its first column."""
        if self._width:
            self._print(f"\r{' ' * self._width}\r")
            self._width = 0

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(text, end="", file=sys.stderr, flush=True)


def exit_on_sigterm() -> None:
    """Turn the first SIGTERM into an orderly exit with status 143; a second one kills."""

    def handle(_number: int, _frame: types.FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise SystemExit(143)

    with contextlib.suppress(ValueError):  # not the main thread: a test or another program
        signal.signal(signal.SIGTERM, handle)


@contextlib.contextmanager
def interrupt_asks() -> Iterator[Callable[[], bool]]:
    """Within the block the first Ctrl-C only sets a flag, which the yielded function reads.

    An answer then stops between two tokens, and the engine stays usable. The second Ctrl-C raises.
    """
    is_asked = False

    def handle(_number: int, _frame: types.FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            raise KeyboardInterrupt
        is_asked = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: is_asked
    finally:
        signal.signal(signal.SIGINT, before)
