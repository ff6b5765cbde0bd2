"""The whole engine around a model that is no `Decoder`, against a direct computation."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engine.toy_model import MODULUS, WINDOW, ToyModel
from tests.mtp_model import mtp_model
from tests.tiny_llm import LLAMA, assert_idle, gpu_share, greedy, ids_of
from tiercel.engine import build
from tiercel.errors import InvalidRequestError
from tiercel.llm import LLM
from tiercel.models.source import open_source
from tiercel.request.score_task import ScoreRead, ScoreTask
from tiercel.runner import prompt_graphs
from tiercel.runner.prompt_graphs import padded_sizes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_NEW = 30
LENGTHS = (1, 2, 15, 16, 17, 40, 90)
PROMPTS = [[(7 * i * i + 3 * i + 11 * n) % 250 + 1 for i in range(n)] for n in LENGTHS]


def open_toy(path=LLAMA, device="cpu", **options):
    source = open_source(path)
    family = replace(source.family, model=f"{ToyModel.__module__}:ToyModel")
    share = {} if device == "cpu" else {"gpu_memory_utilization": gpu_share()}
    return LLM(replace(source, family=family), device=device, dtype="float32",
               max_model_len=160, **share, **options)  # fmt: skip


def direct_logits(llm, ids, first=0):
    """(T, vocab_size) logits after each token from the `first` on, without a cache."""
    model = llm._engine.runner.model
    ids = torch.tensor(ids, device=model.head.device)
    positions = torch.arange(len(ids), device=ids.device)
    left = model.left(ids, positions).double()
    whole = left.cumsum(0)
    recent = whole.clone()
    recent[WINDOW:] -= whole[:-WINDOW]
    states = torch.cat((whole, recent), 1)[first:] % MODULUS - MODULUS // 2
    return (states @ model.head.double()).cpu()


def direct_answer(llm, prompt, count, allowed=None):
    """Greedy tokens after a prompt."""
    banned = llm._engine.runner.sampler.is_banned.bool().cpu()
    if allowed is not None:
        banned = torch.ones_like(banned).index_fill_(0, torch.tensor(allowed), 0)
    ids = list(prompt)
    for _ in range(count):
        logits = direct_logits(llm, ids, -1)[0].masked_fill(banned, -torch.inf)
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def generate(llm, prompts, allowed=None):
    params = greedy(NUM_NEW, allowed_token_ids=allowed)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)


def check_answers(llm, prompts=PROMPTS, allowed=None):
    found = [answers for (answers,) in ids_of(generate(llm, prompts, allowed))]
    assert found == [direct_answer(llm, prompt, NUM_NEW, allowed) for prompt in prompts]
    assert_idle(llm)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", [512, 24])
def test_answers_together_and_in_chunks(device, budget):
    with open_toy(device=device, max_num_batched_tokens=budget, max_num_seqs=5) as llm:
        check_answers(llm)
        assert [len(group.layers) for group in llm._engine.runner.pools] == [1, 1]


@pytest.mark.parametrize("budget", [512, 24])
def test_answers_of_padded_steps_on_a_cpu(monkeypatch, budget):
    """The same padded batches as on a GPU: their bounds hold after long prefixes too."""
    monkeypatch.setattr(
        prompt_graphs, "sizes_for", lambda model, config: padded_sizes(2**30, budget)
    )
    with open_toy(max_num_batched_tokens=budget, max_num_seqs=5) as llm:
        check_answers(llm)
        (output,) = generate(llm, [[*PROMPTS[-1], 5, 6, 7]])
        assert output.metrics.num_cached_tokens == 64
        assert ids_of([output]) == [[direct_answer(llm, [*PROMPTS[-1], 5, 6, 7], NUM_NEW)]]


@pytest.mark.parametrize("device", DEVICES)
def test_a_prompt_found_in_the_cache(device):
    with open_toy(device=device) as llm:
        check_answers(llm, PROMPTS[-1:])
        (output,) = generate(llm, [[*PROMPTS[-1], 5, 6, 7]])
        assert output.metrics.num_cached_tokens == 64
        expected = direct_answer(llm, [*PROMPTS[-1], 5, 6, 7], NUM_NEW)
        assert ids_of([output]) == [[expected]]


@pytest.mark.parametrize("device", DEVICES)
def test_preemption(monkeypatch, device):
    monkeypatch.setattr(build, "cache_blocks", lambda groups, **sizes: [12] * len(groups))
    with open_toy(device=device, max_num_seqs=5, max_num_batched_tokens=48) as llm:
        check_answers(llm)
        assert llm._engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("device", DEVICES)
def test_logits_of_a_prompt(device):
    with open_toy(device=device) as llm:
        ids = PROMPTS[-1]
        assert np.array_equal(llm.logits(ids), direct_logits(llm, ids).float().numpy())


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_of_the_text(device):
    """Answers of two tokens, which repeat pairs of their own; drafts are right by chance."""
    with open_toy(device=device, spec="ngram", num_spec_tokens=4) as llm:
        check_answers(llm, allowed=[5, 9])
        counts = llm.draft_counts
        assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", ["mtp", "hybrid"])
def test_drafts_of_the_head(tmp_path, device, spec):
    path = mtp_model(tmp_path / "m.gguf")
    with open_toy(path, device, spec=spec, num_spec_tokens=3, max_num_batched_tokens=64) as llm:
        assert [len(group.layers) for group in llm._engine.runner.pools] == [2, 1]
        check_answers(llm, [ids for ids in PROMPTS if len(ids) > WINDOW])
        counts = llm.draft_counts
        assert 0.5 < counts.num_accepted_tokens / counts.num_draft_tokens < 1


@pytest.mark.parametrize("device", DEVICES)
def test_items_are_scored_one_by_one(device, caplog):
    caplog.set_level("INFO", "tiercel")
    query, items, labels = PROMPTS[-1], PROMPTS[:5], [5, 9, 200]
    with open_toy(device=device, max_num_seqs=4) as llm:
        output = llm.score(query, items, label_token_ids=labels)
        banned = llm._engine.runner.sampler.is_banned.bool().cpu()
        for item, found in zip(items, output.logprobs, strict=True):
            logits = direct_logits(llm, [*query, *item], -1)[0].masked_fill(banned, -torch.inf)
            np.testing.assert_allclose(found, logits.log_softmax(0)[labels], rtol=1e-5)
        again = llm.score(query, items, label_token_ids=labels)
        assert again.usage.cached_tokens == 64
        assert_idle(llm)
        task = ScoreTask(((1,),), ((ScoreRead(0, (5,)),),))
        with pytest.raises(InvalidRequestError, match="no items after a shared prompt"):
            llm._engine.submit(llm._inputs.score_request(query, task))
    assert "packs no items" in caplog.text
