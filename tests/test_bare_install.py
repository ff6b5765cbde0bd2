"""A CPU installation without extras has everything that it imports.

The tests' environment has the development tools, so it hides a missing import. Here child processes
see only Tiercel's own requirements: no Triton, no bindings of CUDA, no extra.
"""

import ast
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.cli.harness import environment, error_line, tiercel
from tests.gguf_files import tiny_model
from tests.serve.harness import start_server
from tests.tiny_llm import LLAMA

ROOT = Path(__file__).parents[1]
EXTRAS = {
    "matplotlib",
    "opentelemetry",
    "ray",
}  # modules of `bench`, `otel` and `ray`, reported on use
IMPORT_ALL = """
import importlib, json, pkgutil, tiercel
missing = {}
for module in pkgutil.walk_packages(tiercel.__path__, "tiercel."):
    if module.name != "tiercel.__main__":
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing[module.name] = error.name
print(json.dumps(missing))
"""


def required_distributions():
    """Tiercel, its requirements without extras, and their requirements."""
    found, queue = set(), ["tiercel"]
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform or Python
            continue
        queue += [re.match(r"[\w.-]+", text)[0] for text in requirements if "extra ==" not in text]
    return found


@pytest.fixture(scope="module")
def bare():
    """Environment variables of a process that sees an installation without extras."""
    required = required_distributions()
    hidden = {"triton", "cuda"}  # a CUDA build of torch requires them
    for module, owners in metadata.packages_distributions().items():
        names = {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners}
        if not names & required and module.isidentifier():
            hidden.add(module)
    assert {"pytest", "matplotlib", "transformers", "triton"} <= hidden
    assert not {"torch", "numpy", "tiercel", "cyclopts"} & hidden
    return {
        "HIDDEN_MODULES": ",".join(sorted(hidden)),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/bare_install"), str(ROOT)]),
    }


def imports_triton(path):
    """Whether a module, or a kernel module that it imports, imports Triton at its top."""
    modules = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    if any(name.partition(".")[0] == "triton" for name in modules):
        return True
    kernels = (ROOT / (name.replace(".", "/") + ".py") for name in modules if "kernels." in name)
    return any(imports_triton(kernel) for kernel in kernels if kernel.is_file())


def test_every_module_but_triton_kernels_is_imported_without_extras(bare):
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        env=os.environ | bare,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    missing = json.loads(done.stdout)
    device_code = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): "triton"
        for path in (ROOT / "tiercel/kernels").rglob("*.py")
        if imports_triton(path)
    }
    assert device_code
    others = {name: module for name, module in missing.items() if name not in device_code}
    assert set(others.values()) <= EXTRAS, others
    assert {name: missing.get(name) for name in device_code} == device_code


COMMANDS = (
    ["generate", "the thin man", "-m", str(LLAMA), "--max-tokens", "4"],
    ["generate", "the cat", "--spec", "ngram", "--max-tokens", "4"],
    ["generate", "the cat", "--dtype", "bfloat16", "--max-tokens", "4"],
    ["score", "--query", "the thin ", "--items", "ITEMS", "--labels", "a,b"],
    ["chat", "--max-tokens", "4"],
    ["inspect", "--verify"],
    ["doctor"],
)
RUN_ALL = """
import json, sys
from tiercel.cli.main import run
for arguments in json.loads(sys.argv[1]):
    print(json.dumps([arguments, run(arguments)]), file=sys.stderr)
"""


def test_commands_run_without_extras(bare, tmp_path):
    items = tmp_path / "items.txt"
    items.write_text("man\ncat\n")
    commands = json.dumps(COMMANDS).replace('"ITEMS"', json.dumps(str(items)))
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, commands],
        env=environment(**bare, TIERCEL_MODEL=str(tiny_model(tmp_path / "tiny.gguf"))),
        input="the thin man\n",
        capture_output=True,
        text=True,
        check=True,
    )
    results = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[[")]
    assert [status for _, status in results] == [0] * len(COMMANDS), done.stderr


def test_a_server_answers_without_extras(bare, tmp_path):
    with start_server(LLAMA, "--device", "cpu", log_path=tmp_path / "log", env=bare) as server:
        body = {"model": "tiny", "query": "the thin ", "items": ["man", "cat"]}
        answer = server.post("/v1/score", body | {"label_token_ids": [5, 6]})
        assert answer.status_code == 200, answer.text
        assert server.get("/metrics").status_code == 200


@pytest.mark.parametrize("module", ["torch", "tokenizers"])
def test_a_missing_package_is_said_in_one_line(bare, module, tmp_path):
    env = bare | {"HIDDEN_MODULES": module}
    line = error_line(tiercel("generate", "the cat", "-m", LLAMA, env=env))
    assert f"the Python package of module '{module}' is missing. Install Tiercel again" in line
    done = tiercel("-v", "generate", "the cat", "-m", LLAMA, env=env)
    assert "Traceback (most recent call last)" in done.stderr


def test_a_server_that_lacks_a_package_ends_without_trying_again(bare):
    env = bare | {"HIDDEN_MODULES": "torch"}
    done = tiercel("serve", LLAMA, "--port", "0", "--device", "cpu", env=env, timeout=60)
    assert done.returncode == 1
    assert "the Python package of module 'torch' is missing" in done.stderr.splitlines()[-1]
    assert "restart 1" not in done.stderr
