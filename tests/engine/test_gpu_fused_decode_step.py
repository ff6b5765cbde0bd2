"""Single tokens through one kernel, in an engine: close to the other kernels, and the same bits."""

from __future__ import annotations

import pytest
import torch

from benchmarks.synthetic_model import Shape
from tests.engine.wide_model import open_wide, write_wide_model
from tiercel.params import SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = [[(37 * i + 11 * j) % 500 for j in range(length)] for i, length in enumerate((1, 5, 200))]
GREEDY = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, logprobs=20)
NMSE = 2e-2  # of inputs rounded to 8 bits; the kernels beside it have 5e-5


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_wide_model(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="module", autouse=True)
def _whole_prompts():
    """A prompt found in the cache has keys from other products: other bits, same class."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERCEL_PREFIX_CACHE", "0")
        patch.setenv("TIERCEL_MEGAKERNEL", "1")  # forms that are off by default too
        yield


def open_llm(path, **options):
    return open_wide(path, max_num_seqs=4, **options)


@pytest.fixture(scope="module")
def llm(path, _whole_prompts):
    with open_llm(path) as llm:
        yield llm


def run(llm, prompt, params=GREEDY):
    (output,) = llm.generate({"prompt_token_ids": prompt}, params)
    return output.outputs[0]


def decode_logits(llm, prompt, count):
    """Greedy tokens after a prompt, and the logits that each was taken from, but for the first."""
    steps = llm._engine.runner.decode_steps
    rows = []
    real = steps.__class__.__call__

    def spy(self, *arguments):
        result = real(self, *arguments)
        rows.append(result[1][0].clone())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps.__class__, "__call__", spy)
        answer = run(llm, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    return answer.token_ids, torch.stack(rows[: count - 1])


def check_logits(llm, prompt):
    """Steps against one pass over the same tokens, which takes kernels for many tokens."""
    assert llm._engine.runner.model.fused_decode_step is not None
    tokens, logits = decode_logits(llm, prompt, 40)
    whole = llm.logits([*prompt, *tokens[:-1]])
    expected = torch.as_tensor(whole)[len(prompt) :].to(logits)
    assert logits.shape == expected.shape
    nmse = (logits - expected).square().sum(1) / expected.square().sum(1)
    assert nmse.max().item() <= NMSE
    best = expected.topk(2).values
    # Where the lead exceeds what rounding may move, the token is the same.
    spread = (logits - expected).abs().amax(dim=1)
    is_clear = best[:, 0] - best[:, 1] > 2 * spread
    assert is_clear.any()
    assert torch.equal(logits.argmax(1)[is_clear], expected.argmax(1)[is_clear])


@pytest.mark.parametrize("prompt", PROMPTS[1:], ids=len)
def test_logits_are_close_to_those_of_the_other_kernels(llm, prompt):
    check_logits(llm, prompt)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(1024, 4, 16, 8, 128, 3072, vocab=512, context=4096), id="qwen3"),
        pytest.param(
            Shape(2048, 4, 32, 8, 64, 2048, vocab=512, context=4096, arch="llama"), id="llama"
        ),
        pytest.param(
            Shape(1536, 4, 12, 2, 128, 2304, vocab=512, context=4096, arch="qwen2"), id="qwen2"
        ),
    ],
)
def test_logits_of_other_sizes_are_close(shape, tmp_path):
    """Several rows a warp; heads of 64; six query heads on one and biases."""
    with open_llm(write_wide_model(tmp_path / "m.gguf", shape)) as llm:
        check_logits(llm, PROMPTS[2])


def test_a_replay_has_the_bits_of_an_eager_step(llm, monkeypatch):
    replayed = [run(llm, prompt) for prompt in PROMPTS]
    again = [run(llm, prompt) for prompt in PROMPTS]
    monkeypatch.setattr(llm._engine.runner.decode_steps, "_graphs", {})
    eager = [run(llm, prompt) for prompt in PROMPTS]
    for answers in (again, eager):
        assert [a.token_ids for a in answers] == [a.token_ids for a in replayed]
        assert [a.logprobs for a in answers] == [a.logprobs for a in replayed]


@pytest.mark.parametrize(
    ("name", "value"),
    [("TIERCEL_MEGAKERNEL", "0"), ("TIERCEL_EXACT", "1"), ("TIERCEL_INT8_ACTIVATIONS", "0")],
)
def test_switches_leave_it_out(path, monkeypatch, name, value):
    """Then a token has the bits that it has in a batch."""
    monkeypatch.setenv(name, value)
    with open_llm(path) as other:
        assert other._engine.runner.model.fused_decode_step is None
        alone = run(other, PROMPTS[1])
        together = other.generate([{"prompt_token_ids": p} for p in (PROMPTS[1],) * 3], GREEDY)
        assert [o.outputs[0].logprobs for o in together] == [alone.logprobs] * 3


def test_one_copy_serves_steps_of_any_size_with_the_same_bits(llm, path, monkeypatch):
    """Of one row, of four, which the layer tail takes, and of prompts, which packed_gemm takes."""
    together = [{"prompt_token_ids": PROMPTS[1 + i % 2][: 5 + i]} for i in range(4)]
    expected = [run(llm, prompt) for prompt in PROMPTS]
    expected += [output.outputs[0] for output in llm.generate(together, GREEDY)]
    monkeypatch.setenv("TIERCEL_ONE_COPY", "1")
    with open_llm(path) as other:
        model = other._engine.runner.model
        assert model.fused_decode_step is not None
        assert model.fused_layer_tail is not None
        stream = model.fused_decode_step.weights.stream.data
        for layer in model.layers:
            for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up):
                for segment in linear.weight.segments:
                    assert segment.tensor.planes["weights"] is stream
        found = [run(other, prompt) for prompt in PROMPTS]
        found += [output.outputs[0] for output in other.generate(together, GREEDY)]
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]
    assert [a.logprobs for a in found] == [a.logprobs for a in expected]


def test_a_lone_row_that_verifies_nothing_decodes_as_without_speculation(llm, path):
    tokens = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    plain = [run(llm, prompt, tokens).token_ids for prompt in PROMPTS]
    with open_llm(path, spec="ngram") as drafts:
        assert drafts._engine.runner.model.fused_decode_step is not None
        drafts._engine.scheduler.policy.costs = [(4, 1e9)]
        assert [run(drafts, prompt, tokens).token_ids for prompt in PROMPTS] == plain
        logged = [run(drafts, prompt).token_ids for prompt in PROMPTS]  # draws after the graph
    assert logged == plain


def test_two_engines_side_by_side(llm, path):
    expected = run(llm, PROMPTS[2])
    with open_llm(path) as second:
        engines, requests = (llm._engine, second._engine), []
        for engine in engines:
            requests.append(llm._inputs.request(PROMPTS[2], GREEDY, 0))
            engine.submit(requests[-1])
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        while any(engine.has_work for engine in engines):
            for engine, stream in zip(engines, streams, strict=True):
                with torch.cuda.stream(stream):
                    engine.step()
    assert [r.output_token_ids for r in requests] == [list(expected.token_ids)] * 2
