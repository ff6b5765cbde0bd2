"""A row that was used before is as good as new: nothing of a former request shows in the next one.

Each kind of request runs after each other kind on one row, and on a row whose state was filled
with garbage before: what is drawn, drafted and read must be, step by step, what a new engine gives.
"""

from __future__ import annotations

import contextlib
import itertools
import random

import numpy as np
import pytest
import torch

from tests.tiny_llm import DATA, assert_idle, open_tiny
from tiercel.engine import build as engine_module
from tiercel.faults import Fault, Faults
from tiercel.grammar.spec import compile_spec
from tiercel.models.decoder import Decoder
from tiercel.params import SamplingParams, StructuredOutputs
from tiercel.request.request import Status
from tiercel.request.score_task import ScoreRead, ScoreTask
from tiercel.runner.sampler import _Edits
from tiercel.seeds import mix_key
from tiercel.spec.policy import INITIAL_ACCEPTANCE

TEXT = [97 + i * i % 7 for i in range(40)]  # pairs come again: drafts are made
LETTERS = {"temperature": 1.2, "allowed_token_ids": tuple(range(97, 104)), "seed": 5}
# Kind of request: prompt, options of `SamplingParams`, and what else is asked.
KINDS = {
    "greedy": (TEXT, {"temperature": 0.0}, {}),
    "drawn": (TEXT[:9], {"seed": 2**40}, {}),
    "cut": (TEXT[3:20], {"seed": 7, "top_k": 9, "top_p": 0.8, "min_p": 0.05}, {}),
    "repetition": (TEXT[:5], {"temperature": 0.0, "repetition_penalty": 1.9}, {}),
    "counted": (TEXT[2:11], {"presence_penalty": 1.5, "frequency_penalty": 1.0, "seed": 1}, {}),
    "biased": (TEXT[:3], {"seed": 3, "logit_bias": {98: 60.0, 101: 60.0, 99: -100}}, {}),
    "words": (TEXT[:12], LETTERS | {"bad_words": ("ab", "c")}, {}),
    "letters": (TEXT, LETTERS, {}),
    "least": (
        TEXT[:20],
        LETTERS | {"seed": 6, "min_tokens": 6, "stop_token_ids": (97, 98, 99, 100)},
        {},
    ),
    "form": (TEXT[:6], {"temperature": 0.0}, {"form": StructuredOutputs(regex="(ab|cd){2,3}")}),
    "logprobs": (TEXT[:7], {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2}, {}),
    "few drafts": (TEXT, LETTERS | {"num_spec_tokens": 1}, {}),
    "no drafts": (TEXT, LETTERS | {"num_spec_tokens": 0}, {}),
    "logits": (TEXT[:35], {}, {"max_tokens": 0, "wants_logits": True}),
    "mean": (TEXT[1:], {}, {"max_tokens": 0, "pooling": "mean"}),
    "scored": (TEXT[:33], {}, {"items": ((5, 6), (7,), (8, 9, 10))}),
    "aborted": (TEXT, LETTERS, {"abort_after": 2}),
    "unsound": (TEXT, LETTERS, {"nan_after": 3}),
    "stuck": (TEXT, {"logit_bias": dict.fromkeys(range(272), -100)}, {}),
}


def open_one_row(**options):
    """Small blocks and chunks, so that a prompt takes several."""
    sizes = {"max_num_seqs": 1, "max_model_len": 128, "max_num_batched_tokens": 32}
    return open_tiny(DATA / "qwen3-tiny.gguf", **(sizes | {"spec": "ngram"} | options))


def make_request(llm, kind):
    prompt, fields, asked = KINDS[kind]
    params = SamplingParams(**({"max_tokens": 9, "seed": 1} | fields))
    options = {key: asked[key] for key in ("max_tokens", "wants_logits") if key in asked}
    if "items" in asked:
        task = ScoreTask(asked["items"], ((ScoreRead(0, (97, 3)),),))
        return llm._inputs.score_request(list(prompt), task)
    if "form" in asked:
        options["grammar"] = compile_spec(asked["form"], max_tokens=128)
    request = llm._inputs.request(list(prompt), params, 0, **options)
    request.pooling = asked.get("pooling")
    llm._frontend.set_matcher(request)
    return request


def _values(array):
    """Bytes, which compare by ==; of no array, none."""
    return b"" if array is None else array.tobytes()


def results_of(request):
    """All that a caller may see of it."""
    return (
        request.output_token_ids, request.logprobs, request.prompt_logprobs, request.finish_reason,
        request.stop_reason, _values(request.embedding), _values(request.scores),
        b"".join(map(_values, request.prompt_logits)),
    )  # fmt: skip


def run(llm, kind):
    """Run a request alone; its results, and what each of its steps drew and drafted."""
    engine, (_, _, asked) = llm._engine, KINDS[kind]
    request, drawn, collect = make_request(llm, kind), [], engine.runner.collect

    def watched(launch):
        result = collect(launch)
        drawn.append(result.get(request))
        return result

    engine.runner.collect = watched
    nan_at = engine.scheduler._step_id + asked.get("nan_after", -1)
    engine.runner.faults = Faults((Fault("nan", 0, nan_at),))
    engine.submit(request)
    while engine.has_work:
        engine.step()
        if request.row >= 0 and request.draft_limit and drawn and drawn[-1]:
            chance = engine.runner.rows.drafts.acceptance[request.row].item()
            assert request.acceptance == pytest.approx(chance, rel=1e-5), "the host's estimate"
        if len(request.output_token_ids) >= asked.get("abort_after", 99):
            engine.abort(request)
    engine.runner.collect = collect
    assert_idle(llm)
    return results_of(request), drawn


def settle(patch):
    patch.setenv("TIERCEL_PREFIX_CACHE", "0")
    patch.setattr(Decoder, "block_size", 8)


@pytest.fixture(autouse=True)
def _no_hits(monkeypatch):
    """A prompt that is found is computed in other chunks."""
    settle(monkeypatch)


@pytest.fixture(scope="module")
def expected():
    """What each kind gives on an engine of its own."""
    with pytest.MonkeyPatch.context() as patch:
        settle(patch)
        found = {}
        for kind in KINDS:
            with open_one_row() as llm:
                found[kind] = run(llm, kind)
    return found


def walk_of_pairs(kinds, steps):
    """A walk in which each kind is followed by those so many places on (Eulerian, with step 1)."""
    places = range(len(kinds))
    following = {kinds[i]: [kinds[(i + n) % len(kinds)] for n in steps] for i in places}
    walk, stack = [], [kinds[0]]
    while stack:
        if following[stack[-1]]:
            stack.append(following[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def test_the_kinds_here_decide(expected):
    """Each option changes an answer, drafts are right and wrong, and forms and ends are met."""
    outputs = {kind: results for kind, (results, _) in expected.items()}
    reasons = [results[3] for results in outputs.values()]
    assert {"stop", "length", "abort", "error"} == set(reasons)
    assert len(outputs["least"][0]) == 7, "it ends where it first may"
    steps = [step for _, drawn in expected.values() for step in drawn if step]
    drafts = sum(step.num_drafts for step in steps)
    right = sum(len(step.token_ids) - 1 for step in steps)
    assert 0 < right < drafts
    assert len({str(results) for results in outputs.values()}) == len(outputs) - 2, (
        "drafts change nothing"
    )


@pytest.mark.parametrize("length", [1, 9, 31, 33, 47])
def test_greedy_answers_are_what_the_logits_say(length):
    """So that kinds are not compared with an engine that is wrong in the same way."""
    draw = random.Random(length)
    prompt = [draw.randrange(5, 250) for _ in range(length)]
    with open_one_row() as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": prompt}, params)
        answer = output.outputs[0].token_ids
        logits = llm.logits([*prompt, *answer])
    assert logits[length - 1 : -1].argmax(axis=1).tolist() == answer


# Of the list of kinds; 0: behind itself.
@pytest.mark.parametrize(
    "steps",
    [(0, 1, 2, 5, 7, 11), pytest.param(tuple(range(len(KINDS))), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_each_kind_is_the_same_behind_each_other_kind_on_one_row(expected, steps):
    walk = walk_of_pairs(list(KINDS), steps)
    assert len(set(itertools.pairwise(walk))) == len(KINDS) * len(steps)
    with open_one_row() as llm:
        for before, kind in itertools.pairwise(["", *walk]):
            assert run(llm, kind) == expected[kind], f"{kind} behind {before}"


def poison_row(llm, row, draw):
    """Fill what a free row keeps on the device and on the host with garbage, and free blocks too.

    Numbers are sound: a block that nobody wrote is hidden by masks, which multiply it by 0.
    """
    runner, cache = llm._engine.runner, llm._engine.scheduler.cache
    rows, sampler, proposer = runner.rows, runner.sampler, runner.proposer
    held = {id(column) for column in (rows.block_tables, rows.token_ids)}
    integers = [
        rows.num_tokens, rows.num_computed, rows.top_k, rows.key, rows.num_prompt, rows.max_new,
        rows.token_ids, rows.drafts.draft_ids, rows.drafts.draft_limit, rows.drafts.num_wanted,
        rows.drafts.num_idle,
    ]  # fmt: skip
    for column in integers:
        most = 250 if id(column) in held else 60
        column[row] = torch.randint(1, most, column[row].shape, generator=draw)
    rows.drafts.acceptance[row] = 0.01
    for column in rows.values.values():
        column[row] = 1.7
    for group, allocator in enumerate(cache.allocators):
        table = rows.block_tables[group, row]
        table[:] = torch.randint(1, allocator.num_blocks, table.shape, generator=draw)
    counts, is_in_prompt = sampler._penalties._tables()
    counts[row] = torch.randint(0, 5, counts[row].shape, generator=draw)
    is_in_prompt[row] = torch.randint(0, 2, counts[row].shape, generator=draw) > 0
    only = torch.ones(counts.shape[1], dtype=torch.bool)
    only[11] = False
    sampler._edits[row] = _Edits(only, torch.tensor([9]), torch.tensor([11]), torch.tensor([50.0]))
    if proposer is not None:
        proposer._index.inserted[row] = 60
    for pool, allocator in zip(runner.pools, cache.allocators, strict=True):
        free = [i for i in range(1, allocator.num_blocks) if not allocator._references[i]]
        for planes in pool.layers.values():
            for plane in planes.values():
                garbage = torch.randn((len(free), *plane.shape[1:]), generator=draw)
                plane[free] = garbage.to(plane.dtype)


def poison_at_each_entry(llm):
    """Let every row that is given to a request hold garbage until then; also after a preemption."""
    runner, draw = llm._engine.runner, torch.Generator().manual_seed(4)
    launch = runner.launch

    def poisoned(plan):
        for part in plan.scheduled:
            if part.enters:
                poison_row(llm, part.row, draw)
        return launch(plan)

    runner.launch = poisoned


def test_nothing_of_a_row_full_of_garbage_is_left_when_a_request_enters_it(expected):
    with open_one_row() as llm:
        poison_at_each_entry(llm)
        for kind in KINDS:
            assert run(llm, kind) == expected[kind], kind


def check_row(llm, part):
    """Each column of a row that was just entered holds what the request asks, and nothing else."""
    request, row, runner = part.request, part.row, llm._engine.runner
    rows, sampler, params = runner.rows, runner.sampler, part.request.params
    tokens = [*request.prompt_token_ids, *request.output_token_ids]
    assert rows.token_ids[row, : len(tokens)].tolist() == tokens
    vocab_size = llm.source.config.vocab_size
    told = {
        "num_tokens": len(tokens), "num_computed": part.start,
        "top_k": params.top_k or vocab_size, "key": mix_key(request.seed, request.stream),
        "num_prompt": len(request.prompt_token_ids), "max_new": request.max_tokens,
    }  # fmt: skip
    assert {name: getattr(rows, name)[row].item() for name in told} == told
    limit = request.draft_limit
    told = {"draft_limit": limit, "num_wanted": limit, "num_idle": 0}
    assert {name: getattr(rows.drafts, name)[row].item() for name in told} == told
    assert rows.drafts.draft_ids[row, 0] == 0
    values = {
        "temperature": params.temperature, "top_p": params.top_p, "min_p": params.min_p,
        "presence": params.presence_penalty, "frequency": params.frequency_penalty,
        "repetition": params.repetition_penalty,
    }  # fmt: skip
    assert {name: values[row].item() for name, values in rows.values.items()} == pytest.approx(
        values, rel=1e-6
    )
    assert rows.drafts.acceptance[row].item() == pytest.approx(INITIAL_ACCEPTANCE, rel=1e-6)
    for group, held in enumerate(request.block_ids):
        assert rows.block_tables[group, row, : len(held)].tolist() == held
    if params.has_penalties:
        counts, is_in_prompt = sampler._penalties._tables()
        seen = [request.output_token_ids.count(i) for i in range(vocab_size)]
        assert counts[row].tolist() == seen
        assert set(is_in_prompt[row].nonzero().flatten().tolist()) == set(request.prompt_token_ids)
    edits = sampler._edits.get(row) or _Edits()
    allowed, bias = params.allowed_token_ids, params.logit_bias
    assert (edits.banned is None) == (allowed is None)
    assert allowed is None or (~edits.banned).nonzero().flatten().tolist() == sorted(allowed)
    assert (edits.bias_ids is None) == (not bias)
    assert not bias or edits.bias_ids.tolist() == list(bias)
    assert (edits.stop_ids is None) == (not params.min_tokens)
    assert bool(edits.bad_words) == bool(params.bad_words)
    assert not runner.proposer._index.inserted[row].any()


def test_a_row_that_is_entered_holds_what_its_request_asks(monkeypatch):
    """Also again, after a step that was lost: then the answer so far is counted too."""
    with open_one_row() as llm:
        poison_at_each_entry(llm)
        runner, checked = llm._engine.runner, []
        write, collect = runner._write_rows, runner.collect

        def watched(plan):
            write(plan)
            assert not runner.rows._staged, "they would be written again"
            for part in plan.scheduled:
                if part.enters:
                    check_row(llm, part)
                    checked.append(len(part.request.output_token_ids))

        def lose_some(launch):
            if runner.lost_at == llm._engine.scheduler._step_id:
                raise RuntimeError("lost")
            return collect(launch)

        monkeypatch.setattr(runner, "_write_rows", watched)
        monkeypatch.setattr(runner, "collect", lose_some)
        for kind in KINDS:
            request = make_request(llm, kind)
            runner.lost_at = llm._engine.scheduler._step_id + 5
            llm._engine.submit(request)
            while llm._engine.has_work:
                with contextlib.suppress(RuntimeError):
                    llm._engine.step()
        assert max(checked) > 1
        assert len(checked) > len(KINDS)


@pytest.mark.parametrize("where", ["launch", "apply", "collect"])
def test_a_request_whose_step_is_lost_gives_what_it_gives_undisturbed(monkeypatch, expected, where):
    """Every step of every kind is lost once, its staged writes and half-read prompt with it."""
    with open_one_row() as llm:
        poison_at_each_entry(llm)
        engine, lost = llm._engine, 0
        owner = engine.runner.rows if where == "apply" else engine.runner
        original, step = getattr(owner, where), engine.step
        left = [0]

        def failing(*arguments):
            left[0] -= 1
            if left[0]:
                return original(*arguments)
            if where == "collect":  # what it read of the prompt has been delivered by then
                original(*arguments)
            raise RuntimeError("lost")

        def stepping():
            try:
                return step()
            except RuntimeError:
                assert not engine.runner.rows._staged, "writes of a lost step"
                return []

        monkeypatch.setattr(owner, where, failing)
        monkeypatch.setattr(engine, "step", stepping)
        kinds = [kind for kind in KINDS if KINDS[kind][2].keys().isdisjoint(("nan_after",))]
        for kind in kinds:
            for number in range(1, 1 + min(4, len(expected[kind][1]))):
                left[0] = number
                results, _ = run(llm, kind)
                lost += left[0] <= 0
                assert_close(results, expected[kind][0], f"{kind}, step {number}")
        assert lost > 2 * len(kinds)


def numbers_of(entries):
    return [value for e in entries for value in (e.logprob, *(v for _, v in e.top))]


def assert_close(results, expected, what):
    """Equal but for the last digits: what is computed anew comes in other chunks."""
    *told, embedding, scores, logits = results
    *exact, embedding_before, scores_before, logits_before = expected
    for own, before in ((told[1], exact[1]), (told[2], exact[2])):
        assert [e.token_id for e in own] == [e.token_id for e in before], what
        assert numbers_of(own) == pytest.approx(numbers_of(before), abs=1e-4), what
    assert (told[0], *told[3:]) == (exact[0], *exact[3:]), what
    pairs = ((embedding, embedding_before), (scores, scores_before), (logits, logits_before))
    for mine, theirs in pairs:
        values, others = np.frombuffer(mine, np.float32), np.frombuffer(theirs, np.float32)
        assert values.shape == others.shape, what
        np.testing.assert_allclose(values, others, atol=2e-4, rtol=1e-4, err_msg=what)


@pytest.mark.parametrize("num_steps", [1, 3, 6])
def test_blocks_with_nan_are_zeroed_before_anyone_else_has_them(expected, num_steps):
    with open_one_row() as llm:
        engine, request = llm._engine, make_request(llm, "letters")
        engine.submit(request)
        for _ in range(num_steps):
            engine.step()
        planes = [
            plane
            for pool in engine.runner.pools
            for planes in pool.layers.values()
            for plane in planes.values()
        ]
        for plane in planes:
            plane[request.block_ids[0]] = float("nan")  # as a sum that has overflown leaves it
        while engine.has_work:
            engine.step()
        assert (request.finish_reason, request.stop_reason) == ("error", "nonfinite_logits")
        write = engine.runner._write_rows

        def checked(plan):
            write(plan)
            assert all(plane.isfinite().all() for plane in planes)

        engine.runner._write_rows = checked
        assert run(llm, "greedy") == expected["greedy"]


@pytest.mark.parametrize(("overlap", "spec"), [("0", "ngram"), ("1", "ngram"), ("1", "off")])
def test_a_busy_batch_on_rows_full_of_garbage_answers_as_alone(
    monkeypatch, expected, overlap, spec
):
    """Many of each kind at once, preempted and aborted: rows go from kind to kind."""
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    sizes, draw = engine_module.cache_blocks, random.Random(overlap)
    monkeypatch.setattr(
        engine_module, "cache_blocks",
        lambda groups, **options: [min(size, 1 + 7) for size in sizes(groups, **options)],
    )  # fmt: skip
    kinds = [kind for kind in KINDS if kind not in ("aborted", "unsound")] * 2
    draw.shuffle(kinds)
    with open_one_row(max_num_seqs=3, max_num_batched_tokens=48, spec=spec) as llm:
        poison_at_each_entry(llm)
        engine = llm._engine
        requests = [make_request(llm, kind) for kind in kinds]
        waiting, aborted = list(requests), set()
        while waiting or engine.has_work:
            for _ in range(min(len(waiting), draw.randrange(3))):
                engine.submit(waiting.pop())
            running = engine.scheduler.running
            if running and draw.random() < 0.1:
                aborted.add(victim := draw.choice(running))
                engine.abort(victim)
            engine.step()
        assert engine.scheduler.num_preemptions > 0
        assert aborted
        assert_idle(llm)
    for kind, request in zip(kinds, requests, strict=True):
        assert request.status is Status.FINISHED
        if request not in aborted:
            assert_close(results_of(request), expected[kind][0], kind)
