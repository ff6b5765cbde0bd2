"""docs/deepseek_v4.md: its commands and program run, on the tiny model; its figures hold."""

import io
import math
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import dsv4_files
from tests.cli.harness import COMMAND, environment
from tests.models.test_deepseek_v4_config import FLASH, PRO
from tests.patience import PATIENCE_S
from tiercel.cli.main import run
from tiercel.models.deepseek_v4 import ARCHITECTURE, cache_bytes, read_hf
from tiercel.models.deepseek_v4_tensors import needed
from tiercel.models.footprint import weight_footprint
from tiercel.models.stored import StoredWeight
from tiercel.quant_types import QuantType

GIB = 2**30
PAGE = (Path(__file__).parents[1] / "docs/deepseek_v4.md").read_text()
PROGRAM, OPERATORS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = re.findall(r"^    ((?:tiercel|curl) (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
SERVE, CURL = (line for line in LINES if line.startswith(("tiercel serve", "curl")))
ON_CPU = {"TIERCEL_DEVICE": "cpu", "TIERCEL_DTYPE": "float32"}
FP8 = re.compile(r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|shared_experts|[eh]_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the names of the page are the tiny model."""
    path = tmp_path_factory.mktemp("page")
    dsv4_files.write_tokenizer(dsv4_files.write_released(path / "DeepSeek-V4-Flash"))
    dsv4_files.write_gguf(path / "DeepSeek-V4-Flash-Q2_K.gguf")
    return path


def test_the_commands(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for name, value in ON_CPU.items():
        monkeypatch.setenv(name, value)
    for line in LINES:
        command, *arguments = re.findall(r'"[^"]*"|\S+', line)
        if command == "tiercel" and arguments[0] != "serve":
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hi\n")))
            assert run([word.strip('"') for word in arguments]) == 0, line
            assert capsys.readouterr().out, line


def test_the_server(folder):
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    arguments = SERVE.replace("8000", "0").split()[1:]
    server = subprocess.Popen(
        [*COMMAND, *arguments], cwd=folder, env=environment(**ON_CPU), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        url = server.stdout.readline().strip()
        port = url.rpartition(":")[2]
        wait_until_ready(f"{url}/ready", server)
        line = CURL.replace("8000", port).replace("curl ", "curl -sS --fail ")
        answer = subprocess.run(
            ["bash", "-c", line],
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr
        assert '"completion_tokens":4' in answer.stdout.replace(" ", "")
    finally:
        server.terminate()
        server.stdout.close()
        server.wait(PATIENCE_S)


def wait_until_ready(url, server):
    for _ in range(600):
        assert server.poll() is None
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server does not start")


def test_the_program(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    exec(compile(PROGRAM, "docs/deepseek_v4.md", "exec"), {})
    assert "(3, 131)" in capsys.readouterr().out


def test_the_operators(capsys):
    exec(compile(OPERATORS, "docs/deepseek_v4.md", "exec"), {})
    assert "[5, 6]" in capsys.readouterr().out


# --- The tables --------------------------------------------------------------------------------


def file_bytes(qtype, shape):
    count, matrices = math.prod(shape), math.prod(shape[:-2])
    if qtype is QuantType.FP8_BLOCK:
        return count + matrices * math.ceil(shape[-2] / 128) * math.ceil(shape[-1] / 128)
    if qtype is QuantType.NVFP4:
        return count // 2 + count // 16 + matrices * 4
    return count // qtype.value[1] * qtype.value[2]


def released(values, experts, fp8=QuantType.FP8_BLOCK, matrices=QuantType.BF16):
    """A file of released shapes, as far as its footprint needs one."""
    config, stored = read_hf(values, "config.json"), {}
    for need in needed(config):
        if need.name.endswith("tid2eid"):
            qtype = QuantType.I64
        elif len(need.shape) == 3:
            is_draft = need.name.startswith("mtp.") and experts is QuantType.NVFP4
            qtype = QuantType.MXFP4 if is_draft else experts
        elif FP8.search(need.name):
            qtype = fp8
        elif len(need.shape) == 1 or not need.name.endswith(".weight"):
            qtype = QuantType.F32
        else:
            qtype = matrices
        stored[need.name] = StoredWeight(
            qtype=qtype,
            shape=need.shape,
            planes={"data": (need.name,)},
            nbytes=file_bytes(qtype, need.shape),
            block=(128, 128),
            limit=int(qtype is QuantType.I64),
        )
    return SimpleNamespace(stored=stored, config=config, family=ARCHITECTURE, names={})


def gib(source, dtype="bfloat16", device="cuda", **options):
    return f"{weight_footprint(source, dtype, device, **options).nbytes / GIB:.1f}"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("Flash, released (FP8, MXFP4 experts)", released(FLASH, QuantType.MXFP4)),
        ("Flash, NVFP4 experts", released(FLASH, QuantType.NVFP4)),
        (
            "Flash GGUF, Q2_K experts, other matrices Q8_0",
            released(FLASH, QuantType.Q2_K, QuantType.Q8_0, QuantType.Q8_0),
        ),
        (
            "Flash GGUF, IQ2_XXS experts, other matrices Q8_0",
            released(FLASH, QuantType.IQ2_XXS, QuantType.Q8_0, QuantType.Q8_0),
        ),
        ("Pro, released", released(PRO, QuantType.MXFP4)),
        ("Pro, NVFP4 experts", released(PRO, QuantType.NVFP4)),
    ],
)
def test_the_table_of_weights(name, source):
    size = sum(stored.nbytes for stored in source.stored.values())
    with_head = gib(source, has_draft_head=True)
    assert f"| {name} | {size / 1e9:.1f} | {gib(source)} | {with_head} |" in PAGE


def test_the_figures_of_float32():
    flash = released(FLASH, QuantType.MXFP4)
    small = released(FLASH, QuantType.Q2_K, QuantType.Q8_0, QuantType.Q8_0)
    sizes = [gib(source, "float32", "cpu") for source in (flash, small)]
    assert f"the released Flash takes {sizes[0]} GiB and Q2_K {sizes[1]} GiB" in PAGE


def test_the_released_file_has_the_published_size():
    """159,609,485,896 bytes of tensors, headers included."""
    size = sum(s.nbytes for s in released(FLASH, QuantType.MXFP4).stored.values())
    assert size == pytest.approx(159_609_485_896, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "values", "kv_dtype"),
    [
        ("Flash, `--kv-dtype fp8`", FLASH, "fp8"),
        ("Flash, `bf16`", FLASH, "bf16"),
        ("Flash, `float32`", FLASH, "float32"),
        ("Pro, `fp8`", PRO, "fp8"),
    ],
)
def test_the_table_of_the_cache(name, values, kv_dtype):
    config = read_hf(values, "config.json")
    lengths = (8192, 32768, 131_072, 1_048_576)
    sizes = [cache_bytes(config, n, "bfloat16", "cuda", kv_dtype) / GIB for n in lengths]
    assert f"| {name} | {' | '.join(f'{size:.2f}' for size in sizes)} |" in PAGE
