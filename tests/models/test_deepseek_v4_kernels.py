"""DeepSeek-V4 through the Triton kernels of its layers, in Triton's interpreter on a CPU."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tiercel import LLM
from tiercel.ops import latent_rope, latent_step_write, mhc_mix, moe_route, step_index

DATA = Path(__file__).parents[1] / "data/dsv4"
REFUSALS = (
    (mhc_mix, "mhc_mix_refusal"),
    (latent_rope, "rope_refusal"),
    (moe_route, "route_refusal"),
    (latent_step_write, "step_write_refusal"),
    (step_index, "index_refusal"),
)


@pytest.fixture
def on_kernels(monkeypatch):
    """Ops take CPU tensors to the kernels' launches; the number of calls that were taken."""
    calls = dict.fromkeys((name for _, name in REFUSALS), 0)

    def accept(name, find):
        def refusal(*args, **kwargs):
            reason = find(*args, **kwargs)
            calls[name] += reason.endswith("not on a GPU")
            return "" if reason.endswith("not on a GPU") else reason

        return refusal

    for module, name in REFUSALS:
        monkeypatch.setattr(module, name, accept(name, getattr(module, name)))
    return calls


@pytest.mark.parametrize("prompt", [2])
def test_logits_match_the_reference(prompt, on_kernels):
    expected = load_file(DATA / "expected.safetensors")
    llm = LLM(DATA / "tiny", device="cpu", dtype="float32")
    tokens = expected[f"p{prompt}.tokens"].tolist()
    logits = llm.logits(tokens)
    torch.testing.assert_close(
        torch.as_tensor(logits), expected[f"p{prompt}.logits"], rtol=0, atol=2e-4
    )
    assert all(on_kernels.values())
