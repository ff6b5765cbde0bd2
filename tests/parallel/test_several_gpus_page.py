"""docs/several_gpus.md: its table of memory holds, and its commands exist."""

import re
from pathlib import Path

import pytest

from tests.large_models import sparse_model
from tests.models.test_deepseek_v4_config import FLASH, PRO
from tests.test_deepseek_v4_docs import GIB, released
from tiercel.models.footprint import cache_bytes, weight_footprint
from tiercel.models.sharding import Sharding
from tiercel.models.source import open_source
from tiercel.quant_types import QuantType

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/several_gpus.md").read_text()
V4_CONTEXT, DENSE_CONTEXT = 131_072, 32_768


def row(name, source, dtype, context):
    cells = []
    for size in (1, 2, 4, 8):
        rank = Sharding(0, size)
        weights = weight_footprint(source, dtype, "cuda", sharding=rank)
        kept = cache_bytes(source.config, context, dtype, "cuda", sharding=rank)
        cells.append(f"{weights.nbytes / GIB:.1f} + {kept / GIB:.2f}")
    return f"| {name} | {' | '.join(cells)} | {weights.whole_bytes / GIB:.1f} |"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("DeepSeek-V4-Flash, released", released(FLASH, QuantType.MXFP4)),
        (
            "DeepSeek-V4-Flash, GGUF with Q2_K experts",
            released(FLASH, QuantType.Q2_K, QuantType.Q8_0, QuantType.Q8_0),
        ),
        ("DeepSeek-V4-Pro, released", released(PRO, QuantType.MXFP4)),
    ],
)
def test_memory_of_deepseek_v4(name, source):
    assert row(name, source, "bfloat16", V4_CONTEXT) in PAGE


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen3-8B, Q4_K_M", "qwen3-8b"),
        ("Qwen3-32B, Q4_K_M", "qwen3-32b"),
        ("Llama-3-70B, Q4_K_M", "llama3-70b"),
    ],
)
def test_memory_of_dense_models(tmp_path, name, model):
    source = open_source(sparse_model(tmp_path / "m.gguf", model))
    assert row(name, source, "float16", DENSE_CONTEXT) in PAGE


def test_the_commands_of_the_benchmark_are_its_options():
    text = (ROOT / "benchmarks/v4_ranks.py").read_text()
    commands = re.findall(r"benchmarks\.v4_ranks (.*)", PAGE)
    assert len(commands) == 6
    for option in {word for line in commands for word in line.split() if word.startswith("--")}:
        assert f'"{option}"' in text
