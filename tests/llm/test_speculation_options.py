"""Drafts with every option of a request: each answer is that of plain decoding.

On a tiny model in float32, drafting even if drafts are mostly wrong.
"""

import random
from dataclasses import fields

import pytest

from tests.llm.test_busy_batch import run_alone, run_busy
from tests.llm.test_speculation import METHODS, path_of, some_prompts
from tests.tiny_llm import DATA, assert_idle, ids_of, open_tiny
from tiercel.cache.prefix import ROOT
from tiercel.config import SpecConfig
from tiercel.engine import build as engine_module
from tiercel.engine import load as build
from tiercel.models.decoder import Decoder
from tiercel.params import SamplingParams, StructuredOutputs

__all__ = ["path_of"]  # a fixture

DRAWN = {"temperature": 1.5, "seed": 3}
# Letters a to h, in turn: pairs recur, and the tokens after them are random.
FEW = DRAWN | {"allowed_token_ids": tuple(range(97, 105)), "frequency_penalty": 1.9}
# For each option of a request, a value that matters; 271 ends an answer.
OPTIONS = {
    "n": DRAWN | {"n": 2},
    "temperature": {"temperature": 1.2, "seed": 1},
    "top_p": DRAWN | {"top_p": 0.6},
    "top_k": DRAWN | {"top_k": 3},
    "min_p": DRAWN | {"min_p": 0.2},
    "seed": DRAWN | {"seed": 2**63 - 1},
    "stop": FEW | {"stop": ("ad", "hc", "bg")},
    "stop_token_ids": FEW | {"stop_token_ids": (100,)},
    "include_stop_str_in_output": FEW | {"stop": ("b", "f"), "include_stop_str_in_output": True},
    "ignore_eos": DRAWN | {"logit_bias": {271: 100.0}, "ignore_eos": True},
    "min_tokens": FEW | {"stop_token_ids": (97, 100), "min_tokens": 21},
    "max_tokens": {"max_tokens": 23},
    "logprobs": FEW | {"logprobs": 4},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "presence_penalty": {"presence_penalty": 1.7},
    "frequency_penalty": {"frequency_penalty": 1.9},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "logit_bias": DRAWN | {"logit_bias": {97: 100.0, 98: 100.0}},
    "bad_words": FEW | {"bad_words": ("a", "bc")},
    "allowed_token_ids": FEW,
    "skip_special_tokens": FEW
    | {"allowed_token_ids": (97, 98, 269), "ignore_eos": True, "skip_special_tokens": False},
    "detokenize": DRAWN | {"detokenize": False},
    "structured_outputs": {"structured_outputs": StructuredOutputs(regex=r"(ab|cd){20,30}")},
    "num_spec_tokens": DRAWN | {"num_spec_tokens": 2},
}


def make_params(options):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 40} | options))


def answers_of(llm, options):
    """The visible results of a batch by name, with the log-probabilities separate."""
    llm._engine.runner.sampler._theta.zero_()  # draft even if drafts are mostly wrong
    params = [make_params(chosen) for chosen in options.values()]
    found = {}
    outputs = llm.generate(some_prompts()[-1:] * len(params), params)
    for name, output in zip(options, outputs, strict=True):
        entries = [e for answer in output.outputs for e in answer.logprobs or ()]
        entries += [e for e in output.prompt_logprobs or () if e is not None]
        texts = [(a.text, a.token_ids, a.finish_reason, a.stop_reason) for a in output.outputs]
        tops = [(e.token_id, [token for token, _ in e.top]) for e in entries]
        values = [value for e in entries for value in (e.logprob, *(v for _, v in e.top))]
        found[name] = (texts, tops), values
    return found


def test_the_options_here_are_all_and_decide():
    assert OPTIONS.keys() == {field.name for field in fields(SamplingParams)}
    without = {
        name: {key: value for key, value in options.items() if key != name}
        for name, options in OPTIONS.items()
    }
    without["seed"]["seed"] = 0  # without one it is random
    with open_tiny(DATA / "qwen3-tiny.gguf") as llm:
        found, other = answers_of(llm, OPTIONS), answers_of(llm, without)
    assert [name for name in OPTIONS if found[name] == other[name]] == ["num_spec_tokens"]


@pytest.mark.parametrize("spec", METHODS)
def test_every_option_holds_at_each_place_of_a_draft(path_of, spec):
    path = path_of("mtp") if spec != "ngram" else DATA / "qwen3-tiny.gguf"
    with open_tiny(path) as llm:
        plain = answers_of(llm, OPTIONS)
    with open_tiny(path, spec=spec) as llm:
        drafted = answers_of(llm, OPTIONS)
        counts = llm.draft_counts
        assert_idle(llm)
    assert [name for name in OPTIONS if drafted[name][0] != plain[name][0]] == []
    for name in ("logprobs", "prompt_logprobs"):
        assert drafted[name][1] == pytest.approx(plain[name][1], abs=1e-4)
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens


def test_the_shortest_run_that_is_looked_up_changes_speed_alone(monkeypatch):
    params = make_params(FEW)
    with open_tiny(DATA / "qwen3-tiny.gguf") as llm:
        plain = ids_of(llm.generate(some_prompts(), params))
    counts = set()
    for least in (1, 2, 3, 4):
        config = SpecConfig("ngram", 5, min_ngram=least)
        monkeypatch.setattr(build, "resolve_spec", lambda *_, config=config: config)
        with open_tiny(DATA / "qwen3-tiny.gguf") as llm:
            llm._engine.runner.sampler._theta.zero_()
            assert ids_of(llm.generate(some_prompts(), params)) == plain
            counts.add(llm.draft_counts.num_draft_tokens)
    assert len(counts) == 4


@pytest.mark.parametrize("spec", ["ngram", "hybrid"])
def test_blocks_are_kept_for_others_when_all_their_tokens_are_accepted(monkeypatch, path_of, spec):
    """Prompts that continue other requests' answers, wrong drafts, aborts and preemptions."""
    draw = random.Random(spec)
    path = path_of("mtp") if spec != "ngram" else DATA / "qwen3-tiny.gguf"
    params = make_params(FEW | {"max_tokens": 48})
    monkeypatch.setattr(Decoder, "block_size", 16)
    texts = [[draw.randrange(97, 105) for _ in range(draw.choice((5, 20, 40)))] for _ in range(6)]
    with open_tiny(path, max_model_len=192) as llm:
        alone = [run_alone(llm, llm._inputs.request(text, params, 0)) for text in texts]
        for i in range(6):  # the second half continues answers of the first
            texts.append([*texts[i], *alone[i][: draw.randrange(16, 48)], *([5] * (i % 2))])
            alone.append(run_alone(llm, llm._inputs.request(texts[-1], params, 0)))
    whole = [(*text, *answer) for text, answer in zip(texts, alone, strict=True)]
    sizes = engine_module.cache_blocks

    def few(groups, **options):
        return [min(size, 1 + 14) for size in sizes(groups, **options)]

    monkeypatch.setattr(engine_module, "cache_blocks", few)
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 96, "max_model_len": 192}
    with open_tiny(path, spec=spec, **options) as llm:
        llm._engine.runner.sampler._theta.zero_()
        scheduler = llm._engine.scheduler
        keep, kept = scheduler.cache.keep, {ROOT: ()}
        find, found = scheduler.cache.find, []

        def watched(parent_key, token_ids, *others):
            own = keep(parent_key, token_ids, *others)
            kept[own] = (*kept[parent_key], *token_ids)
            return own

        def seen(token_ids):
            match = find(token_ids)
            found.append(kept[match.parent_key])
            return match

        monkeypatch.setattr(scheduler.cache, "keep", watched)
        monkeypatch.setattr(scheduler.cache, "find", seen)
        requests = [llm._inputs.request(text, params, 0) for text in texts]
        aborted = run_busy(llm._engine, requests, draw)
        counts = llm.draft_counts
        assert scheduler.num_preemptions > 0
        assert aborted
        assert_idle(llm)
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    assert len(kept) > 30
    assert sum(len(tokens) > 40 for tokens in found) > 3, "no prompt is longer: parts of answers"
    for tokens in kept.values():
        assert any(tokens == text[: len(tokens)] for text in whole), "tokens of no answer"
    for request, expected in zip(requests, alone, strict=True):
        got = request.output_token_ids
        assert got == (expected[: len(got)] if request in aborted else expected)
