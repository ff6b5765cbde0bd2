"""Random models of every architecture, head size and type on a GPU against the CPU's float32."""

import pytest

from tests.gguf_files import ENCODERS, tiny_model
from tests.models.test_gguf_cases import BOUNDS, nmse
from tests.parity import log_softmax
from tests.tiny_llm import open_on_gpu, open_tiny
from tiercel.params import SamplingParams

pytestmark = pytest.mark.gpu
PROMPT = [(37 * i + i // 5) % 290 for i in range(150)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
# Of log-probabilities, with activations of 16 bits (gemma3 has the largest) and of 8 bits.
ERRORS = {"0": 0.1, "1": 0.3}


def check(path, error=ERRORS["1"]):
    """All logits of a prompt, and decode steps after it in a graph."""
    with open_on_gpu(path, dtype="float16", max_num_seqs=4) as llm:
        logits = llm.logits(PROMPT)
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY)
    answer = output.outputs[0]
    with open_tiny(path) as llm:
        expected = llm.logits([*PROMPT, *answer.token_ids])
    assert nmse(logits, expected[: len(PROMPT)]) <= BOUNDS["float16"][0]
    steps = log_softmax(expected[len(PROMPT) - 1 : -1])
    for step, token, entry in zip(steps, answer.token_ids, answer.logprobs, strict=True):
        assert step[token] >= step.max() - error
        assert abs(entry.logprob - step[token]) <= error


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("int8_activations", ERRORS)
def test_architectures_and_head_sizes(tmp_path, monkeypatch, int8_activations, arch, head_dim):
    monkeypatch.setenv("TIERCEL_INT8_ACTIVATIONS", int8_activations)
    sizes = {"hidden": 512, "ff": 1024, "layers": 3, "head_dim": head_dim}
    model = tiny_model(tmp_path / "m.gguf", arch, qtype="Q4_K", heads=8, kv_heads=2, **sizes)
    check(model, ERRORS[int8_activations])


@pytest.mark.parametrize("qtype", sorted(ENCODERS))
def test_types(tmp_path, qtype):
    sizes = {"hidden": 256, "ff": 768, "layers": 2, "head_dim": 64}
    check(tiny_model(tmp_path / "m.gguf", "qwen3", qtype=qtype, heads=4, kv_heads=2, **sizes))


@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"])
def test_rows_that_are_no_multiple_of_256(tmp_path, qtype):
    sizes = {"hidden": 576, "ff": 1504, "layers": 2, "head_dim": 64}
    check(tiny_model(tmp_path / "m.gguf", "llama", qtype=qtype, heads=9, kv_heads=3, **sizes))
