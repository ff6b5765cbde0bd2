"""Messages are one line, progress is off standard output, text cannot control a terminal."""

import io
import logging
import sys

from tiercel.cli import terminal
from tiercel.cli.terminal import (
    ProgressReporter,
    PromptLine,
    one_line,
    say,
    show_log,
    write,
)


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


def test_one_line():
    assert one_line("a\nb\tc\x1b[0m\u202e") == "a b c\\x1b[0m\\u202e"
    assert one_line("grüße 你好 🙂") == "grüße 你好 🙂"


def test_text_for_a_terminal_loses_control_characters(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    write("a\x1b[2J\x07b\n\tc\x9b")
    assert stream.getvalue() == "a[2Jb\n\tc"


def test_text_for_a_pipe_is_exact(capsys):
    write("a\x1b[2J\n")
    assert capsys.readouterr().out == "a\x1b[2J\n"


def test_a_broken_standard_error_is_no_error(monkeypatch):
    class Broken(io.StringIO):
        def write(self, _text):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Broken())
    say("error", "x")
    with ProgressReporter(is_quiet=False) as report:
        report("stage", 1, 2)


def test_progress_without_a_terminal_names_long_stages_once(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: now[0])
    with ProgressReporter(is_quiet=False) as report:
        for step in range(10):
            now[0] += 0.3
            report("Fetching", step, 10)
        report("Unpacking", 1, 1)
    captured = capsys.readouterr()
    assert captured.err == "Fetching ...\n"
    assert captured.out == ""


def test_quiet_progress(capsys, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: float(next(now)))
    with ProgressReporter(is_quiet=True) as report:
        for step in range(5):
            report("Fetching", step, 10)
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal_is_a_bar(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(terminal, "has_colour", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressReporter(is_quiet=False) as report:
        report("Fetching [red]x", 0, 10)
        report("Fetching [red]x", 5, 10)
        report("Loading")
    assert "Fetching [red]x" in stream.getvalue()
    assert "Loading" in stream.getvalue()


def test_warnings_of_the_package_are_lines(capsys):
    logger = logging.getLogger("tiercel")
    show_log(is_verbose=False, is_quiet=False)
    logger.warning("the cache is %s", "full")
    logger.debug("detail")
    show_log(is_verbose=False, is_quiet=True)
    logger.warning("not shown")
    show_log(is_verbose=True, is_quiet=False)
    logger.debug("shown")
    assert capsys.readouterr().err == "warning: the cache is full\ndebug: shown\n"


def show_prompt(monkeypatch, stream, *, is_quiet=False):
    """A prompt of 100 tokens in five steps of 0.4 s."""
    now = [0.0]
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", stream)
    with PromptLine(is_quiet=is_quiet) as line:
        for done in (20, 40, 60, 80, 99):
            now[0] += 0.4
            line(done, 100)
    return stream.getvalue()


def test_a_long_prompt_shows_its_progress_and_erases_it(monkeypatch):
    text = show_prompt(monkeypatch, Terminal())
    *shown, erased, end = text.split("\r")[1:]
    assert shown == [f"reading prompt, {share}%" for share in (60, 80, 99)]
    assert (erased, end) == (" " * len("reading prompt, 99%"), "")


def test_progress_of_a_prompt_is_for_terminals_alone(monkeypatch):
    assert show_prompt(monkeypatch, io.StringIO()) == ""
    assert show_prompt(monkeypatch, Terminal(), is_quiet=True) == ""


def test_a_short_prompt_leaves_no_trace(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with PromptLine(is_quiet=False) as line:
        line(50, 100)
    assert stream.getvalue() == ""
