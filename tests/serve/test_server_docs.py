"""docs/server.md: its commands run, and its tables name what there is."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.fake_client import fake_app
from tests.serve.http.test_metrics import render
from tiercel.cli.main import make_app
from tiercel.cli.serve_options import LimitOptions
from tiercel.serve.http.metrics import Metrics

TEXT = (Path(__file__).parents[2] / "docs/server.md").read_text()
COMMANDS = [
    command
    for block in re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    for command in re.findall(r"^curl (?:.*\\\n)*.*$", block, re.MULTILINE)
]
# Of the common options, those that every command explains.
COMMON = {"config", "verbose", "quiet", "help", "version"}
PAGE = {"/", "/favicon.ico"}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_work(command, server):
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    line = command.replace("http://127.0.0.1:8000", server.url).replace("curl ", "curl -sS --fail ")
    result = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_every_route_without_generation_has_a_command():
    asked = {re.search(r"http://127.0.0.1:8000(\S*)", command)[1] for command in COMMANDS}
    generating = re.compile(
        r"/v1/(chat/|completions|responses|messages|embeddings)|(/v[12])?/(score|rerank|decisions)"
    )
    for route in fake_app().routes:
        path = route.path.replace("{id:path}", "tiny")
        if "{" in path or generating.match(path) or not route.methods or path in PAGE:
            continue
        assert {path, path.removeprefix("/v1"), f"/v1{path}"} & asked, path


def test_every_option_is_explained_and_there():
    explained = set(re.findall(r"`--([a-z-]+)`", TEXT))
    arguments = make_app()["serve"].assemble_argument_collection()
    names = {n[2:] for argument in arguments for n in argument.names if n.startswith("--")}
    assert explained <= names
    assert names - COMMON <= explained


def test_limits_have_the_defaults_of_the_table():
    rows = re.findall(r"^\| ((?:`--max-[a-z-]+`(?:, )?)+) \| ([^|]*) \|", TEXT, re.MULTILINE)
    found = {}
    for names, values in rows:
        options = re.findall(r"`--([a-z-]+)`", names)
        found.update(zip(options, values.split(", "), strict=len(options) > 1))
    for name in LimitOptions.__dataclass_fields__:
        default = getattr(LimitOptions(), name)
        shown = "none" if default is None else f"{default:g}" if default < 1e5 else str(default)
        assert found[name.replace("_", "-")].strip() == shown, name


def test_every_metric_is_explained():
    names = set(re.findall(r"^# TYPE tiercel:(\S+) (?:counter|histogram|gauge)$",
                           render(Metrics()), re.MULTILINE))  # fmt: skip
    names = {name for name in names if not name.endswith("_created")}
    later = ("score_",)
    missing = [name for name in names if f"`{name}" not in TEXT and not name.startswith(later)]
    assert missing == []
