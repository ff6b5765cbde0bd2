"""The default model against recorded log-probabilities of an exact float32 forward."""

import pytest

from tests import parity
from tiercel.llm import LLM
from tiercel.params import SamplingParams

CASE = parity.CASES["smollm2-135m-instruct-q4_1"]


@pytest.mark.parametrize(
    ("dtype", "profile"),
    [
        pytest.param("float32", parity.FP32, id="fp32"),
        pytest.param("auto", parity.INT8, id="default"),
        pytest.param("bfloat16", parity.BITS16, id="floats", marks=pytest.mark.slow),
    ],
)
def test_parity(default_model, dtype, profile, monkeypatch):
    if profile is parity.BITS16:
        monkeypatch.setenv("TIERCEL_INT8_ACTIVATIONS", "0")
    with LLM(default_model, dtype=dtype) as llm:
        figures = parity.measure(llm, CASE)
        parity.check(figures, profile)
        out = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
    assert out[0].outputs[0].text.startswith(" Paris")


def test_a_wrong_rope_base_fails_the_profile(default_model, monkeypatch):
    """The comparison can fail: base 1e4 instead of 1e5 moves the text mean by 0.1."""
    from dataclasses import replace

    from tiercel.models import decoder_build

    right = decoder_build.rope_table
    monkeypatch.setattr(
        decoder_build, "rope_table", lambda rope, *rest: right(replace(rope, base=1e4), *rest)
    )
    with LLM(default_model, dtype="float32") as llm:
        figures = parity.measure(llm, CASE | {"prompts": CASE["prompts"][:1]})
    assert figures["text_mean"] > 0.05
