"""`tiercel inspect`: facts of valid files, as text and as JSON, without PyTorch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.harness import environment
from tests.gguf_files import tiny_model
from tests.large_models import sparse_model
from tests.tiny_llm import DATA
from tiercel import machine
from tiercel.cli.main import run
from tiercel.machine import Memory
from tiercel.models.footprint import weight_footprint
from tiercel.models.source import open_source

DSV4 = Path(__file__).parents[1] / "data/dsv4/tiny"


@pytest.fixture
def facts(capsys):
    def read(path, *arguments):
        assert run(["inspect", str(path), "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    return read


def test_default_model(facts, default_model):
    found = facts(default_model)
    assert found["config"]["arch"] == "llama"
    assert (found["config"]["num_layers"], found["config"]["hidden_size"]) == (30, 576)
    assert found["file"]["size_bytes"] == default_model.stat().st_size
    assert {row["type"] for row in found["weights"]} == {"Q4_1", "Q8_0", "F32"}
    assert sum(row["tensors"] for row in found["weights"]) == found["file"]["num_tensors"]
    # 30 layers, 3 key/value heads of 64, keys and values, 2 bytes each
    assert found["memory"]["kv_bytes_per_1000_tokens"] == 1000 * 30 * 3 * 64 * 2 * 2
    assert found["runs"]["has_chat_template"]
    assert "tensors" not in found


def test_a_sliding_layer_keeps_its_window(facts):
    found = facts(DATA / "gemma3-tiny.gguf")
    config, memory = found["config"], found["memory"]
    assert config["layer_types"] == {"sliding": 1, "full": 1}
    per_token = config["num_kv_heads"] * config["head_dim"] * 2 * 2
    assert memory["kv_bytes_per_1000_tokens"] == (1000 + 6) * per_token
    assert memory["kv_bytes_full_context"] == (config["max_position"] + 6) * per_token


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_every_architecture(facts, tmp_path, arch):
    path = tiny_model(tmp_path / "m.gguf", arch)
    found = facts(path, "--tensors", "--tokenizer", "--template", "--verify")
    assert found["runs"]["architecture"] == found["config"]["arch"] == arch
    assert sum(found["config"]["layer_types"].values()) == 2
    assert len(found["tensors"]) == found["file"]["num_tensors"]
    assert found["tokenizer"]["vocab_size"] == 300
    assert found["verified"]
    assert found["chat_template"]


def test_text_has_the_same_facts(tiny, capsys):
    arguments = ["--tensors", "--tokenizer", "--template", "--verify"]
    assert run(["inspect", str(tiny), *arguments]) == 0
    text = capsys.readouterr().out
    for word in ("GGUF version 3", "llama-tiny", "Hyperparameters", "num_kv_heads", "Q8_0"):
        assert word in text
    for word in ("blk.1.ffn_up.weight", "vocab_size", "Chat template", "no NaN"):
        assert word in text


def test_toggles_are_shown_and_checked(facts, tiny, capsys, monkeypatch):
    monkeypatch.setenv("TIERCEL_PREFILL_MMQ", "1")
    assert facts(tiny)["runs"]["switches"]["TIERCEL_PREFILL_MMQ"] == "1"
    assert run(["inspect", str(tiny)]) == 0
    assert "TIERCEL_PREFILL_MMQ" in capsys.readouterr().out
    monkeypatch.setenv("TIERCEL_PREFILL_MMQ", "maybe")
    assert run(["inspect", str(tiny)]) != 0
    assert "TIERCEL_PREFILL_MMQ='maybe' cannot be read" in capsys.readouterr().err


def test_fused_kernels_are_told_with_a_reason(facts, tiny, tmp_path, capsys):
    large = sparse_model(tmp_path / "8b.gguf", "qwen3-8b")
    assert set(facts(large)["runs"]["fused_kernels"].values()) == {"fits"}
    found = facts(tiny)["runs"]["fused_kernels"]
    assert "not a multiple of 128" in found["fused_decode_step"]
    assert run(["inspect", str(tiny)]) == 0
    text = capsys.readouterr().out
    assert "Fused kernels (H100/H200, float16)" in text
    assert f"fused_layer_tail       {found['fused_layer_tail']}" in text


def test_names_in_a_file_cannot_steer_the_terminal(facts, tmp_path, capsys):
    path = tiny_model(
        tmp_path / "m.gguf", metadata={"general.name": "\x1b[2J\nerror: x" + "y" * 500}
    )
    assert run(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\nerror: x" not in text
    assert max(map(len, text.splitlines())) < 200


def test_deepseek_v4(facts, capsys):
    found = facts(DSV4, "--verify")
    config = found["config"]
    assert config["layer_types"] == {"hca": 2, "csa": 2}
    assert (config["num_experts"], config["num_hash_layers"]) == (6, 2)
    mix = {row["type"]: row for row in found["weights"]}
    assert set(mix) == {"FP8_BLOCK", "MXFP4", "F32", "BF16", "I64"}
    assert mix["MXFP4"]["weights"] == 5 * 6 * 3 * 64 * 160  # layers and draft block, experts
    assert mix["MXFP4"]["tensors"] == 2 * 5 * 6 * 3  # values and scales
    assert sum(row["bytes"] for row in mix.values()) == found["memory"]["file_weight_bytes"]
    assert found["runs"]["draft_head"] == "mtp"
    assert run(["inspect", str(DSV4)]) == 0
    text = capsys.readouterr().out
    for word in ("draft head             mtp", "hca 2, csa 2", "18.6%", "no dense decoder"):
        assert word in text


def test_no_pytorch(tiny):
    code = (
        "import sys\n"
        "from tiercel.cli.main import run\n"
        f"code = run(['inspect', {str(tiny)!r}, '--verify', '--quiet', '--tokenizer'])\n"
        f"code = code or run(['inspect', {str(DSV4)!r}, '--verify', '--quiet'])\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, capture_output=True)


@pytest.mark.usefixtures("without_native")
def test_memory_is_what_the_engine_will_take(facts, tmp_path, capsys, monkeypatch):
    """A file of 5.0 GB: each device and dtype with its forms, and the memory of this machine."""
    path = sparse_model(tmp_path / "8b.gguf", "qwen3-8b")
    memory = Memory(4_800_000_000, 24_000_000_000, 6_000_000_000)
    monkeypatch.setattr(machine, "read_memory", lambda: memory)
    found = facts(path)["memory"]
    assert found["file_weight_bytes"] == pytest.approx(5.02e9, rel=1e-3)
    for device, dtypes in found["at_rest"].items():
        for dtype, weights in dtypes.items():
            planned = weight_footprint(open_source(path), dtype, device)
            assert weights["weight_bytes"] == planned.nbytes == sum(weights["forms"].values())
    assert (found["available_bytes"], found["limit_bytes"]) == (memory.available, memory.limit)
    # Half of v and down in Q6_K; neither embedding nor head.
    assert found["step_copy_bytes"] == pytest.approx(4.16e9, rel=2e-2)
    for name, left in (("ONE_COPY", 0), ("MEGAKERNEL", 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(f"TIERCEL_{name}", "1" if name == "ONE_COPY" else "0")
            assert facts(path)["memory"]["step_copy_bytes"] == left
    assert run(["inspect", str(path), "--tensor-parallel-size", "4"]) == 0
    assert "fused_decode_step      not timed on a GPU with sums over 4" in capsys.readouterr().out
    assert run(["inspect", str(path), "-tp", "2"]) == 0
    text = capsys.readouterr().out
    # The copy is no part of the sum above it: it is made only where there is room.
    assert re.search(r"together +\S+ GB\n  and for a fused step   2.1 GB", text)
    assert text.count("fused_decode_step      fits") == 2  # of one GPU, of two
    assert run(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert "on a CPU, bfloat16     7.3 GB (4-bit planes 3.7 GB, bfloat16 2.0 GB, float16" in text
    assert "and for a fused step   4.2 GB" in text
    assert "available here         4.8 GB, within a limit of 6.0 GB" in text
