"""The instructions of messages, help and pages can be followed.

Every text of the package is searched for options, commands, variables, extras and pages. Commands
of `--help` and of the pages that need no network are run, on a tiny model.
"""

import ast
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.gguf_files import tiny_model
from tiercel.cli.main import _COMMANDS, _EXAMPLES, _name_command, _option_names, make_app, run

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tiercel"
SETTINGS = (PACKAGE / "env.py").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PIP = re.compile(r"(?:uv )?pip install[^'\";]*(?:'[^']*')?")
PIP_OPTIONS = {"no-deps", "only-binary", "disable-pip-version-check", "no-input", "progress-bar"}


@cache
def texts(path):
    """(line, text) of each string that users may see; `{}` stands for a value.

    Docstrings count in `cli/` only: those of commands are their help.
    """
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = []
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped = set()
    for node in nodes:
        is_holder = isinstance(node, holders) and path.parent.name != "cli"
        if is_holder and node.body and isinstance(node.body[0], ast.Expr):
            skipped.add(id(node.body[0].value))
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in node.values)
            parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
            found.append((node.lineno, "".join(parts)))
    for node in nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in skipped:
            found.append((node.lineno, node.value))
    return found


@cache
def app_of_all():
    return make_app()


@cache
def option_names():
    app = app_of_all()
    return {name: _option_names(app, name) | {"config", "help"} for name in _COMMANDS}


def commands_of(path):
    """Names of the commands that show the texts of a module: its own command, or any."""
    own = path.stem.replace("_options", "").replace("_", " ")
    return [own] if path.parent.name == "cli" and own in _COMMANDS else [*_COMMANDS]


def mentions(pattern):
    """(path, line, match) of each text that matches; there are some."""
    found = [
        (path, f"{path.relative_to(PACKAGE)}:{line}", match)
        for path in sorted(PACKAGE.rglob("*.py"))
        if "reference" not in path.parts
        and path.name != "build.py"  # of the native library, a command of its own
        for line, text in texts(path)
        if not text.startswith("tiercel ")  # an example, which is read as a whole
        for match in re.findall(pattern, PIP.sub("", text))
    ]
    assert found
    return found


def test_texts_are_found(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""Doc --x."""\ndef f(a):\n    """Doc --y."""\n    return f"--z {a} --w", "--v"\n'
    )
    assert sorted(text for _, text in texts(path)) == ["--v", "--z {} --w"]


def test_every_option_that_a_text_names_is_an_option_of_its_command():
    for path, place, option in mentions(r"(?<![\w{-])--([a-z][a-z-]+)(?![\w=<{-])"):
        known = set().union(*(option_names()[name] for name in commands_of(path)))
        is_of_pip = path.name == "fetch.py" and option in PIP_OPTIONS
        assert is_of_pip or option in known | {"version", "install-completion"}, place


def test_every_command_that_a_text_names_is_understood():
    pattern = r"(?<![\w/.])tiercel ((?:bench )?[a-z]+(?: (?:--[a-z-]+|\{\}))*)"
    app = make_app()
    for _, place, words in mentions(pattern):
        first = words.split()[0]
        assert first in {name.split()[0] for name in _COMMANDS}, place
        arguments = words.replace("{}", "value").split()
        if arguments == ["convert"]:  # the one command that needs arguments of its own
            arguments += ["DIR", "OUT"]
        _, _, unused, *_ = app.parse_known_args(arguments)
        assert not unused, place


def test_every_variable_that_a_text_names_is_read():
    for _, place, name in mentions(r"\bTIERCEL_[A-Z0-9_]*[A-Z0-9]\b"):
        option = name.removeprefix("TIERCEL_").lower().replace("_", "-")
        is_option = any(option in names for names in option_names().values())
        assert f'"{name}"' in SETTINGS or is_option, place


def test_every_extra_that_a_text_names_can_be_installed():
    pattern = r"'(?:tiercel|\.)\[([a-z,]+)\]'|extra `([a-z]+)`"
    pages = [*PACKAGE.rglob("*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    found = {
        name
        for path in pages
        for names in re.findall(pattern, path.read_text())
        for name in "".join(names).split(",")
    }
    assert {"cuda"} < found <= set(EXTRAS)


def test_every_page_that_a_text_names_is_there():
    for _, place, page in mentions(r"docs/[a-z_]+\.md"):
        assert (ROOT / page).is_file(), place


GENERATE = ["generate", "The capital of France is", "--offline"]


@pytest.mark.parametrize(
    "option", [["--verbose"], ["-v"], ["--quiet"], ["-q"], ["-v", "-q"]], ids=str
)
def test_options_of_every_command_may_stand_before_it(option, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TIERCEL_MODEL", str(tmp_path / "missing.gguf"))
    shown = []
    for arguments in ([*option, *GENERATE], [*GENERATE, *option]):
        assert run(arguments) == 1
        shown.append(capsys.readouterr().err)
    assert shown[0].splitlines()[-1] == shown[1].splitlines()[-1]
    is_verbose = bool({"-v", "--verbose"} & set(option))
    assert all(("Traceback (most recent call last)" in text) is is_verbose for text in shown)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "{}", "bench", "speed", "--batch", "2"],
        ["--config={}", "bench", "--batch", "2"],
        ["bench", "--config", "{}", "speed", "--batch", "2"],
        ["-q", "bench", "--config", "{}", "--batch", "2"],
    ],
    ids=" ".join,
)
def test_a_configuration_file_may_be_named_before_the_command(arguments, tmp_path, capsys):
    """The command reports the wrong value in the file."""
    path = tmp_path / "options.toml"
    path.write_text("repetitions = 0\n")
    assert run([word.replace("{}", str(path)) for word in arguments]) == 2
    assert "--repetitions 0 is out of range" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["-v"], 0, "Usage: tiercel COMMAND"),
        (["--verbose", "--help"], 0, "Usage: tiercel COMMAND"),
        (["-q", "--version"], 0, "tiercel 0"),
        (["-v", "bench", "--help"], 0, "Usage: tiercel bench COMMAND"),
        (["-v", "nonsense"], 2, 'unknown command "nonsense"'),
        (["-v", "bench", "nonsense"], 2, 'unknown command "nonsense"'),
        (["generate", "x", "--", "--verbose"], 2, "--verbose"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_before_what_is_no_command(arguments, status, words, capsys):
    assert run(arguments) == status
    shown = capsys.readouterr()
    assert words in shown.out + shown.err


def test_an_internal_error_says_how_to_see_more_and_that_works(monkeypatch, capsys):
    def fail(*_args, **_kwargs):
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("tiercel.loader.hub.resolve", fail)
    assert run(["inspect", "x.gguf"]) == 1
    hint = capsys.readouterr().err
    (option,) = re.findall(r"--[a-z]+", hint)
    for arguments in ([option, "inspect", "x.gguf"], ["inspect", "x.gguf", option]):
        assert run(arguments) == 1
        assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with every file that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    tiny_model(folder / "model.gguf", metadata={"llama.context_length": 256})
    for name in ("notes.txt", "prompt.txt", "words.txt", "reviews.txt", "query.txt"):
        (folder / name).write_text("the thin man\nthe cat\n")
    line = '{"query": "the thin ", "items": ["man", "cat"]}\n'
    (folder / "lists.jsonl").write_text(line)
    (folder / "city.json").write_text('{"type": "boolean"}')
    (folder / "sums.lark").write_text('start: "a"\n')
    (folder / "tiercel.toml").write_text("temperature = 0\n[generate]\nmax_tokens = 4\n")
    return folder


RUN_HERE = ("generate", "chat", "score", "inspect", "doctor")  # others need a network


def examples():
    """Command lines of `--help` and of the pages, without `tiercel`."""
    for lines in _EXAMPLES.values():
        yield from (line.removeprefix("tiercel ") for line in lines)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^ *(?:[^`\n]*[|=0] )?tiercel (\S.*)$", text, re.MULTILINE):
            yield line.split(" | ")[0]


def split(line):
    words = shlex.split(line, comments=True)
    return words[: words.index(">")] if ">" in words else words


EXAMPLES = sorted(set(examples()) - {"score"})  # without arguments it reads standard input
# tests/test_deepseek_v4_docs.py runs those with files of DeepSeek-V4.
RUNNABLE = [x for x in EXAMPLES if x.split()[0] in RUN_HERE and "DeepSeek-V4" not in x]


def test_every_documented_command_is_understood():
    for line in EXAMPLES:
        _, bound, unused, *_ = app_of_all().parse_known_args(_name_command(split(line)))
        assert not unused, line
        assert not {"prompt", "file"} <= set(bound.arguments), line


@pytest.mark.parametrize("line", RUNNABLE)
def test_a_documented_command_runs(line, folder, monkeypatch, stdin, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TIERCEL_MODEL", str(folder / "model.gguf"))
    stdin("the thin\n")
    assert run(split(line)) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip()
