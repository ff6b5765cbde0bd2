"""DeepSeek-V4 on a CPU: a step of several tokens gives each what a step of its own gives it."""

import pytest

from tests.small_v4 import SMALL, text_ids
from tests.step_trace import TracedText
from tiercel import LLM

# PyTorch's products on a CPU add in an order that depends on the number of rows.
PRODUCTS = {
    *("mhc.mhc_mix_pre", "mhc.mhc_mix_step", "mhc.mhc_mix_collapse", "wo_a", "logits"),
    *("compressed_attention.multiply_group", "moe.multiply_group"),
    *("moe.moe_experts", "mtp._embed_proj", "mtp._hidden_proj", "mtp.logits"),
}


@pytest.fixture(scope="module", params=["float32", "fp8"])
def traced(request):
    """The last tokens of a block and the first of the next; entries of both kinds complete."""
    options = {"device": "cpu", "dtype": "float32", "kv_dtype": request.param, "threads": 1}
    with LLM(SMALL, max_num_seqs=1, spec="mtp", **options) as llm:
        model = llm._engine.runner.model
    return TracedText(model, text_ids()[: 250 + 14], 250, "cpu")


@pytest.mark.parametrize("num_tokens", [1, pytest.param(3, marks=pytest.mark.slow), 7, 14])
def test_only_products_may_round_otherwise(traced, num_tokens):
    """All else, the cache included, is the same bit for bit."""
    assert set(traced.differences(num_tokens)) <= (PRODUCTS if num_tokens > 1 else set())
