"""Speculation on a GPU: the text of plain decoding, from graphs, and nothing waits."""

from __future__ import annotations

import pytest
import torch

from tests.gguf_files import tiny_model
from tests.llm.test_speculation import counted
from tests.mtp_model import mtp_model
from tests.tiny_llm import open_on_gpu
from tiercel.params import SamplingParams
from tiercel.runner.decode_graphs import LARGEST_VERIFY_BUCKET, buckets

PROMPTS = [
    {"prompt_token_ids": [(7 * i + j) % (9 + 3 * i) + 5 for j in range(12 + 9 * i)]}
    for i in range(7)
]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=4)
MIXED = [
    SamplingParams(temperature=0.3, top_p=0.9, seed=1, max_tokens=40),
    SamplingParams(temperature=0, presence_penalty=0.3, max_tokens=40),
    SamplingParams(temperature=0.4, top_k=5, min_p=0.1, seed=2, max_tokens=40, logprobs=3),
    SamplingParams(temperature=0, logit_bias={5: 3.0}, min_tokens=5, seed=3, max_tokens=40),
    SamplingParams(
        temperature=0.3, allowed_token_ids=list(range(50)), repetition_penalty=1.2, max_tokens=40,
        seed=4,
    ),
    SamplingParams(bad_words=["the"], temperature=0, max_tokens=40),
    SamplingParams(temperature=0.2, seed=9, max_tokens=40, prompt_logprobs=1),
]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tiny_model(tmp_path / "m.gguf", metadata={"llama.context_length": 512})


def open_for_many(path, **options):
    """Drafts are always verified: their costs, measured beside other tests, would not tell."""
    llm = open_on_gpu(path, max_num_seqs=32, **options)
    if llm._engine.scheduler.policy is not None:
        llm._engine.scheduler.policy.costs = ()
    return llm


def ids_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.gpu
@pytest.mark.parametrize("num_spec_tokens", [1, 3, 5])
@pytest.mark.parametrize("count", [1, 2])
def test_greedy_answers_are_those_of_plain_decoding(path, count, num_spec_tokens):
    """Within the range of row-invariant kernels: rows times places up to 16."""
    with open_for_many(path, dtype="float32") as llm:
        plain = ids_of(llm.generate(PROMPTS[:count], GREEDY))
    options = {"dtype": "float32", "spec": "ngram", "num_spec_tokens": num_spec_tokens}
    with open_for_many(path, **options) as llm:
        counts = counted(llm)
        assert ids_of(llm.generate(PROMPTS[:count], GREEDY)) == plain
    assert counts["right"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["mtp", "hybrid"])
def test_a_head_drafts_the_same_answers_and_waits_for_nothing(tmp_path, monkeypatch, spec):
    path = mtp_model(tmp_path / "mtp.gguf")
    with open_for_many(path, dtype="float32") as llm:
        plain = ids_of(llm.generate(PROMPTS[:2], GREEDY))
    monkeypatch.setenv("TIERCEL_SYNC_DEBUG", "1")
    with open_for_many(path, dtype="float32", spec=spec, num_spec_tokens=4) as llm:
        assert ids_of(llm.generate(PROMPTS[:2], GREEDY)) == plain
        assert llm.draft_counts.num_accepted_tokens > 0
        llm.generate(PROMPTS, MIXED)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_replay_has_the_bits_of_an_eager_step(path, count):
    def run(llm):
        return [output.outputs[0].logprobs for output in llm.generate(PROMPTS[:count], GREEDY)]

    with open_for_many(path, spec="ngram", num_spec_tokens=4) as llm:
        steps = llm._engine.runner.decode_steps
        sizes = len(buckets(32)) + len(buckets(32, LARGEST_VERIFY_BUCKET))
        assert len(steps._graphs) == 2 * sizes
        replayed = run(llm)
        steps._graphs = {}
        assert run(llm) == replayed


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", ["0", "1"])
def test_no_step_waits_for_the_device(path, monkeypatch, overlap):
    monkeypatch.setenv("TIERCEL_SYNC_DEBUG", "1")
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    with open_for_many(path, spec="ngram", num_spec_tokens=4) as llm:
        counts = counted(llm)
        outputs = llm.generate(PROMPTS, MIXED)
        llm.generate(PROMPTS, GREEDY)
    assert counts["right"] > 0
    assert all(output.outputs[0].finish_reason in ("stop", "length") for output in outputs)


@pytest.mark.gpu
def test_drafts_are_fresh_however_late_the_host_learns(path, monkeypatch):
    rates = []
    for overlap in ("0", "1"):
        monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
        with open_for_many(path, spec="ngram", num_spec_tokens=4) as llm:
            llm.generate(PROMPTS, GREEDY)
            counts = llm.draft_counts
            rates.append(counts.num_accepted_tokens / counts.num_draft_tokens)
    assert rates[1] == pytest.approx(rates[0], abs=0.15)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_overlap_changes_no_answer(path, monkeypatch, dtype):
    answers = []
    for overlap in ("0", "1"):
        monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
        with open_for_many(path, spec="ngram", num_spec_tokens=4, dtype=dtype) as llm:
            # Rows times places up to 16: beyond, a product's bits depend on what it verifies.
            answers.append(ids_of(llm.generate(PROMPTS[:3], MIXED[:3])))
    assert answers[0] == answers[1]


@pytest.mark.gpu
def test_no_step_that_verifies_is_eager(path, monkeypatch):
    with open_for_many(path, spec="ngram", num_spec_tokens=4) as llm:
        steps, seen = llm._engine.runner.decode_steps, []
        run = steps._run
        monkeypatch.setattr(steps, "_run", lambda *a: (seen.append(a[2]), run(*a))[1])
        counts = counted(llm)
        llm.generate(PROMPTS, GREEDY)
    assert counts["right"] > 0
    assert not seen


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["ngram", "mtp", "hybrid"])
def test_steps_draw_and_draft_within_their_graph(path, tmp_path, monkeypatch, spec):
    path = path if spec == "ngram" else mtp_model(tmp_path / "mtp.gguf")
    params = SamplingParams(temperature=0.4, seed=1, max_tokens=60, ignore_eos=True)
    with open_for_many(path, spec=spec, num_spec_tokens=4) as llm:
        engine = llm._engine
        requests = [llm._inputs.request(p["prompt_token_ids"], params, i)
                    for i, p in enumerate(PROMPTS)]  # fmt: skip
        for request in requests:
            engine.submit(request)
        while not all(request.output_token_ids for request in requests):
            engine.step()

        def refuse(*_arguments):
            raise AssertionError("drawn or drafted behind the graph")

        monkeypatch.setattr(engine.runner.sampler, "accept", refuse)
        monkeypatch.setattr(engine.runner.proposer, "propose", refuse)
        while engine.has_work:
            engine.step()
        assert llm.draft_counts.num_accepted_tokens > 0
    assert all(len(request.output_token_ids) == 60 for request in requests)


@pytest.mark.gpu
def test_nothing_compiles_once_the_model_is_loaded(path, monkeypatch):
    def refuse(*_arguments, **_options):
        raise AssertionError("compiled after loading")

    with open_for_many(path, spec="ngram") as llm:
        monkeypatch.setattr("triton.runtime.jit.JITFunction._do_compile", refuse)
        monkeypatch.setattr("tiercel.kernels.runtime.rtc.compile_cubin", refuse)
        llm.generate(PROMPTS, MIXED)
        llm.generate([PROMPTS[i % 7] for i in range(30)], GREEDY)


@pytest.mark.gpu
def test_a_rejected_draft_leaves_no_trace(path):
    """After the run the cache holds, in all live places, what one without drafts leaves."""
    held = []
    for spec in ("off", "ngram"):
        with open_for_many(path, dtype="float32", spec=spec, num_spec_tokens=3) as llm:
            request = llm._inputs.request(PROMPTS[0]["prompt_token_ids"], GREEDY, 0)
            engine = llm._engine
            engine.submit(request)
            while len(request.output_token_ids) < 40:
                engine.step()
            blocks = list(request.block_ids[0])
            torch.cuda.current_stream().synchronize()
            count = len(request.prompt_token_ids) + 39
            held.append(
                [
                    plane[blocks].flatten(0, 1)[:count].clone()
                    for planes in engine.runner.pools[0].layers.values()
                    for plane in planes.values()
                ]
            )
            engine.abort(request)
            while engine.has_work:
                engine.step()
    for plain, drafted in zip(*held, strict=True):
        # Sums of dense products of one row and of four differ in their last bits.
        torch.testing.assert_close(plain, drafted, rtol=1e-3, atol=1e-4)
