"""`LLM.score`: each item has the scores that it has alone, in any packing."""

import asyncio
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.gguf_files import tiny_model
from tests.tiny_llm import BOS, DATA, LLAMA, NAMES, assert_idle, greedy, ids_of, open_tiny
from tiercel.async_llm import AsyncLLM
from tiercel.errors import ArgumentError, ContextLengthError, InternalError
from tiercel.llm import LLM
from tiercel.params import StructuredOutputs
from tiercel.runner import runner as runner_module
from tiercel.runner.packed_items import pack_items

TOLERANCE = 1e-4  # nats: float32 sums in another order
QUERY = [(7 * i) % 250 for i in range(150)]
ITEMS = [[(3 * i + 5 * j) % 250 for j in range(1 + 5 * i % 17)] for i in range(24)]
IDS = [5, 9, 200]
TEXTS = ["the thin man ran", "in 2024", "x", "they ran and ran on and on", "é😀"]
LABELS = ["a", "the", "ran on", "ran off"]  # of one token and of several


def alone(llm, sequence, labels):
    """Log-probabilities of labels after a sequence, from the logits of ordinary prompts."""
    padding = [*llm.tokenizer.unused_ids]
    padding += range(llm.tokenizer.vocab_size, llm.source.config.vocab_size)
    result = []
    for label in labels:
        logits = torch.from_numpy(llm.logits([*sequence, *label[:-1]])).double()
        logits[:, padding] = -torch.inf
        logprobs = logits.log_softmax(dim=1)[-len(label) :]
        result.append(sum(row[i].item() for row, i in zip(logprobs, label, strict=True)))
    return result


def each_alone(llm, query, items, labels):
    return np.array([alone(llm, [*query, *item], labels) for item in items])


def assert_near(actual, expected, atol=TOLERANCE):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, equal_nan=False)


@pytest.fixture(scope="module", params=NAMES)
def llm(request):
    with open_tiny(DATA / f"{request.param}.gguf", max_num_batched_tokens=256) as opened:
        yield opened
        assert_idle(opened)


@pytest.fixture(scope="module")
def tiny():
    with open_tiny() as opened:
        yield opened
        assert_idle(opened)


# ---- equal to each item alone


@pytest.mark.parametrize("length", [150, 128, 7, 1, 0])
def test_packed_items_equal_each_alone(llm, length):
    """Query cold, then cached in part or completely; without any query."""
    query = QUERY[:length]
    expected = each_alone(llm, query, ITEMS, [[i] for i in IDS])
    for _ in range(2):
        output = llm.score(query, ITEMS, label_token_ids=IDS)
        assert_near(output.logprobs, expected)
    assert output.usage.cached_tokens == length // 64 * 64
    assert output.usage.prompt_tokens == length + sum(map(len, ITEMS))
    assert output.usage.mode == "packed"
    assert output.logprobs.dtype == np.float32


def test_labels_of_several_tokens_equal_each_alone(llm):
    output = llm.score("so said ", TEXTS, LABELS)
    tokenizer = llm.tokenizer
    query = tokenizer.with_bos(llm.encode("so said ", parse_special=True))
    labels = [tokenizer.encode_inner(label) for label in LABELS]
    items = [tokenizer.encode_inner(text) for text in TEXTS]
    assert max(map(len, labels)) > 1
    expected = each_alone(llm, query, items, labels)
    assert_near(output.logprobs, expected)
    assert_near(output.probs, np.exp(expected))
    assert_near(output.label_mass, np.exp(expected).sum(axis=1))
    mean = llm.score("so said ", TEXTS, LABELS, label_normalization="mean")
    assert_near(mean.logprobs, expected / [len(label) for label in labels])


def test_labels_may_be_normalised_among_each_other(llm):
    plain = llm.score(QUERY, ITEMS, label_token_ids=IDS).logprobs
    output = llm.score(QUERY, ITEMS, label_token_ids=IDS, normalize="labels")
    assert_near(output.probs.sum(axis=1), np.ones(len(ITEMS)), 1e-6)
    assert_near(np.diff(output.logprobs, axis=1), np.diff(plain, axis=1))
    assert output.label_mass is None
    several = llm.score("so said ", TEXTS, LABELS, normalize="labels")
    expected = llm.score("so said ", TEXTS, LABELS).logprobs
    assert_near(np.diff(several.logprobs, axis=1), np.diff(expected, axis=1))
    assert_near(several.probs.sum(axis=1), np.ones(len(TEXTS)), 1e-6)


def test_labels_that_are_compared_need_their_rows_of_the_head_only(tiny, monkeypatch):
    model = tiny._engine.runner.model
    head = Mock(wraps=model.head, weight=model.head.weight)
    monkeypatch.setattr(model, "head", head)
    tiny.score(QUERY, [*ITEMS, []], label_token_ids=IDS, normalize="labels")
    assert sum(len(call.args[0]) for call in head.call_args_list) == 0
    tiny.score(QUERY, [*ITEMS, []], label_token_ids=IDS)
    rows = sum(len(call.args[0]) for call in head.call_args_list)
    assert rows == len(ITEMS) + 1, "one row for each item"


def test_a_suffix_stands_behind_every_item(llm):
    suffix = [33, 34, 35]
    output = llm.score(QUERY, ITEMS, label_token_ids=IDS, suffix=suffix)
    expected = llm.score(QUERY, [[*item, *suffix] for item in ITEMS], label_token_ids=IDS)
    assert_near(output.logprobs, expected.logprobs)


def test_an_item_may_stand_before_the_query(llm):
    output = llm.score(QUERY[:20], ITEMS[:6], label_token_ids=IDS, item_first=True)
    expected = [alone(llm, [*item, *QUERY[:20]], [[i] for i in IDS]) for item in ITEMS[:6]]
    assert_near(output.logprobs, expected)
    assert output.usage.mode == "separate"
    assert output.usage.prompt_tokens == sum(len(item) + 20 for item in ITEMS[:6])


@pytest.mark.parametrize("labels", [[[7]], [[7], [8, 9], [8, 9, 10]]])
def test_empty_items_and_items_longer_than_a_step(labels):
    """They are separate prompts; the scores do not change."""
    items = [[1, 2], [], [(3 * i) % 250 for i in range(100)], [4]]
    texts = [{"label_token_ids": [7]}, {"labels": ["ran on", "ran off", "a"]}]
    with open_tiny(max_num_batched_tokens=80, max_num_seqs=4) as llm:
        output = llm.score(QUERY, items, **texts[len(labels) > 1])
        if len(labels) > 1:
            labels = [llm.tokenizer.encode_inner(label) for label in texts[1]["labels"]]
        assert_near(output.logprobs, each_alone(llm, QUERY, items, labels))
        assert output.usage.prompt_tokens == 150 + sum(map(len, items))
        assert_idle(llm)


def test_an_empty_item_is_read_at_the_end_of_the_query(tiny):
    (score,) = tiny.score(QUERY, [[]], label_token_ids=IDS).logprobs
    assert_near(score, alone(tiny, QUERY, [[i] for i in IDS]))


@pytest.mark.parametrize("budget", [24, 40, 64])
def test_long_lists_are_cut_at_item_boundaries(llm, budget):
    expected = llm.score(QUERY, ITEMS, label_token_ids=IDS).logprobs
    name = llm.source.path.name
    with open_tiny(DATA / name, max_num_batched_tokens=budget, max_num_seqs=3) as small:
        steps = []
        launch = small._engine.runner.launch
        small._engine.runner.launch = lambda plan: (steps.append(plan), launch(plan))[1]
        output = small.score(QUERY, ITEMS, label_token_ids=IDS)
        assert_idle(small)
    assert_near(output.logprobs, expected)
    runs = [part.items for plan in steps for part in plan.scheduled if part.items]
    assert len(runs) >= sum(map(len, ITEMS)) // budget
    assert [i for run in runs for i in run] == list(range(len(ITEMS))), "each once, in order"
    assert all(plan.num_tokens <= budget for plan in steps)


def test_steps_that_overlap_give_the_same_scores(monkeypatch, llm):
    expected = llm.score(QUERY, ITEMS, label_token_ids=IDS).logprobs
    monkeypatch.setenv("TIERCEL_OVERLAP", "1")
    name = llm.source.path.name
    with open_tiny(DATA / name, max_num_batched_tokens=48, max_num_seqs=2) as small:
        assert small.config.overlap
        for _ in range(2):
            assert_near(small.score(QUERY, ITEMS, label_token_ids=IDS).logprobs, expected)
        assert_idle(small)


def test_scoring_mixes_with_generation_and_schemas(llm):
    """In the same steps, in both directions: no result depends on the others."""
    prompt = {"prompt_token_ids": [*QUERY[:140], 3, 3]}
    expected = llm.score(QUERY, ITEMS, label_token_ids=IDS).logprobs
    (answer,) = llm.generate(prompt, greedy(30))
    name = llm.source.path.name
    with open_tiny(DATA / name, max_num_batched_tokens=64, max_num_seqs=8) as small:
        kinds = []
        launch = small._engine.runner.launch

        def watched(plan):
            kinds.append({bool(part.items) for part in plan.scheduled})
            return launch(plan)

        small._engine.runner.launch = watched
        stream = small.stream(prompt, greedy(30))
        ids = [*next(stream).token_ids]
        output = small.score(QUERY, ITEMS, label_token_ids=IDS)
        ids += [token_id for delta in stream for token_id in delta.token_ids]
        assert_idle(small)
    assert {True, False} in kinds
    assert ids == answer.outputs[0].token_ids
    assert_near(output.logprobs, expected)
    assert output.usage.cached_tokens == 128, "blocks of the other request's prompt"


@pytest.mark.parametrize("spec", ["off", "ngram"])
def test_everything_is_on_at_once_and_nobody_shows_it(monkeypatch, llm, spec):
    """Prefix cache, short steps that overlap, an answer and a document of a schema, drafts."""
    schema = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}},
                                     "required": ["a"], "additionalProperties": False})  # fmt: skip
    asked = [
        ({"prompt_token_ids": [*QUERY[:140], 3, 3]}, greedy(30)),
        ({"prompt_token_ids": [*QUERY[:64], 9]}, greedy(30, structured_outputs=schema)),
    ]
    expected = llm.score(QUERY, ITEMS, label_token_ids=IDS).logprobs
    answers = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt, params in asked]
    monkeypatch.setenv("TIERCEL_OVERLAP", "1")
    name = llm.source.path.name
    with open_tiny(DATA / name, max_num_batched_tokens=48, max_num_seqs=6, spec=spec) as small:
        assert small.config.overlap
        small.score(QUERY, ITEMS[:2], label_token_ids=IDS)
        crowds = []
        launch = small._engine.runner.launch

        def watched(plan):
            crowds.append([bool(part.items) for part in plan.scheduled])
            return launch(plan)

        small._engine.runner.launch = watched
        streams = [small.stream(prompt, params) for prompt, params in asked]
        ids = [[*next(stream).token_ids] for stream in streams]
        output = small.score(QUERY, ITEMS, label_token_ids=IDS)
        for own, stream in zip(ids, streams, strict=True):
            own += [token_id for delta in stream for token_id in delta.token_ids]
        assert (small.draft_counts.num_draft_tokens > 0) == (spec == "ngram")
        assert_idle(small)
    assert any(True in crowd and crowd.count(False) >= 2 for crowd in crowds), "all in one step"
    assert sum(True in crowd for crowd in crowds) > 3, "in chunks"
    assert output.usage.cached_tokens == 128
    assert ids == answers
    assert_near(output.logprobs, expected)


def test_the_ten_best_stay_the_ten_best(llm):
    """In another order, with other items, in other steps, cold and cached; near ties excluded."""
    rng = np.random.default_rng(1)
    items = [rng.integers(0, 250, rng.integers(1, 20)).tolist() for _ in range(60)]
    label = {"label_token_ids": IDS[:1]}
    scores = llm.score(QUERY, items, **label).logprobs[:, 0]
    best = np.argsort(-scores)[:10]
    assert np.diff(np.sort(-scores)[:11]).min() > 2 * TOLERANCE, "no tie decides"
    name = llm.source.path.name
    with open_tiny(DATA / name, max_num_batched_tokens=100, max_num_seqs=4) as small:
        for seed in range(3):
            order = np.random.default_rng(seed).permutation(len(items))
            own = small.score(QUERY, [items[i] for i in order], **label).logprobs[:, 0]
            assert order[np.argsort(-own)[:10]].tolist() == best.tolist()
        alone_ = [small.score(QUERY, [items[i]], **label).logprobs[0, 0] for i in range(60)]
    assert np.argsort(-np.array(alone_))[:10].tolist() == best.tolist()


def test_a_query_that_was_scored_is_cached_for_generation(tiny):
    query = [(13 * i + 2) % 250 for i in range(140)]
    tiny.score(query, ITEMS, label_token_ids=IDS)
    (hit,) = tiny.generate({"prompt_token_ids": [*query, *range(40)]}, greedy(8))
    assert hit.metrics.num_cached_tokens == 128
    with open_tiny() as cold:
        (expected,) = cold.generate({"prompt_token_ids": [*query, *range(40)]}, greedy(8))
    assert ids_of([hit]) == ids_of([expected])


def test_items_leave_nothing_in_the_cache():
    query = [11] * 70
    with open_tiny() as llm:
        llm.score(query, ITEMS, label_token_ids=IDS)
        for pool in llm._engine.runner.pools:
            for planes in pool.layers.values():
                for plane in planes.values():
                    written = plane.flatten(2).abs().sum(dim=2).gt(0)
                    assert written.sum().item() == len(query)


# ---- one item and other items


def test_an_items_tokens_change_no_bit_of_another(llm):
    before = llm.score(QUERY, ITEMS, label_token_ids=IDS).logprobs
    changed = [*ITEMS]
    changed[5] = [(token_id + 77) % 250 for token_id in ITEMS[5]]
    after = llm.score(QUERY, changed, label_token_ids=IDS).logprobs
    kept = [i for i in range(len(ITEMS)) if i != 5]
    assert np.array_equal(before[kept], after[kept])
    assert np.abs(before[5] - after[5]).min() > 1e-3


def test_order_and_doubles_do_not_matter(llm):
    order = np.random.default_rng(0).permutation(len(ITEMS))
    items = [ITEMS[i] for i in order]
    expected = llm.score(QUERY, ITEMS, label_token_ids=IDS).logprobs
    output = llm.score(QUERY, [*items, *items], label_token_ids=IDS).logprobs
    assert_near(output[: len(items)], expected[order])
    assert_near(output[len(items) :], expected[order])


@pytest.mark.parametrize("fault", ["causal", "positions"])
def test_wrong_packing_is_seen(monkeypatch, llm, fault):
    """Negative controls: a causal mask over all items, and positions that continue counting."""
    expected = each_alone(llm, QUERY, ITEMS, [[i] for i in IDS])

    def wrong(parts):
        step = pack_items(parts)
        starts = step.items.item_start
        behind = step.items.item_start > 0
        if fault == "causal":
            starts[behind] = step.items.prefix_len[0]
        else:
            count = int(behind.sum())
            first = step.items.prefix_len[0]
            step.item_positions[behind.numpy()] = np.arange(first, first + count)
        return step

    monkeypatch.setattr(runner_module, "pack_items", wrong)
    output = llm.score(QUERY, ITEMS, label_token_ids=IDS)
    assert np.abs(output.logprobs - expected).max() > 100 * TOLERANCE


# ---- ends


def test_logits_that_are_no_numbers_fail_the_call_alone():
    with open_tiny() as llm:
        weight = llm._engine.runner.model.norm.weight
        kept = weight.clone()
        weight.fill_(float("nan"))
        with pytest.raises(InternalError, match="nonfinite_logits"):
            llm.score(QUERY, ITEMS, label_token_ids=IDS)
        weight.copy_(kept)
        assert_idle(llm)
        output = llm.score(QUERY, ITEMS, label_token_ids=IDS)
        assert output.usage.cached_tokens == 0, "blocks of an unsound request are not kept"
        assert np.isfinite(output.logprobs).all()


def test_leaving_frees_rows_and_blocks(tiny):
    def leave(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.score(QUERY, ITEMS, label_token_ids=IDS, progress=leave)
    assert_idle(tiny)


def test_progress_counts_items():
    heard = []
    with open_tiny(max_num_batched_tokens=64, max_num_seqs=2) as llm:
        llm.score(QUERY, [*ITEMS, []], labels=["a", "ran on"], progress=lambda *x: heard.append(x))
    assert heard[-1] == (25, 25)
    assert heard == sorted(heard)
    assert len({done for done, _ in heard}) > 2


def test_asyncio_gives_the_same_and_cancelling_frees():
    async def main():
        async with AsyncLLM(LLAMA, device="cpu", dtype="float32") as llm:
            scores = await asyncio.gather(
                *(llm.score(QUERY, ITEMS, label_token_ids=IDS) for _ in range(3)),
                llm.generate({"prompt_token_ids": QUERY}, greedy(5)),
            )
            task = asyncio.create_task(llm.score(QUERY, ITEMS * 20, label_token_ids=IDS))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            again = await llm.score(QUERY, ITEMS, label_token_ids=IDS)
            return [*(output.logprobs for output in scores[:3]), again.logprobs]

    with open_tiny() as llm:
        expected = llm.score(QUERY, ITEMS, label_token_ids=IDS).logprobs
    for logprobs in asyncio.run(main()):
        assert_near(logprobs, expected)


# ---- invalid arguments


def test_no_items_have_no_scores(tiny):
    output = tiny.score(QUERY, [], label_token_ids=IDS)
    assert output.logprobs.shape == output.probs.shape == (0, 3)
    assert tiny.score("a", [], LABELS, normalize="labels").logprobs.shape == (0, 4)


@pytest.mark.parametrize(
    ("changes", "message", "param"),
    [
        ({"labels": None}, "neither of labels and label_token_ids is given", "labels"),
        ({"label_token_ids": [1]}, "both of labels and label_token_ids are given", "labels"),
        ({"labels": []}, r"labels=\[\] is no list", "labels"),
        ({"labels": "ab"}, "labels='ab' is no list", "labels"),
        ({"labels": ["a", "a"]}, "labels holds 'a' twice", "labels"),
        ({"labels": ["a", ""]}, "label '' has no tokens", "labels"),
        ({"labels": ["a", 3]}, r"labels\[1\]=3 is not a text", "labels[1]"),
        ({"labels": None, "label_token_ids": [1, 10**6]}, r"label_token_ids\[1\] is 1000000", 0),
        ({"labels": None, "label_token_ids": [1, True]}, r"label_token_ids\[1\]=True", 0),
        ({"labels": None, "label_token_ids": [-1]}, r"label_token_ids\[0\] is -1", 0),
        ({"items": ["a", [1]]}, r"query is text but items\[1\] is not", "items[1]"),
        ({"items": [[1]]}, r"query is text but items\[0\] is not", "items[0]"),
        ({"query": [1], "items": [[1, 2], [1, 10**6]]}, r"items\[1\]\[1\] is 1000000", 0),
        ({"query": [1], "items": [[1, float("nan")]]}, r"items\[0\]\[1\] is nan", 0),
        ({"query": [1], "items": [[[1]]]}, r"items\[0\]\[0\] is \[1\]", "items[0][0]"),
        ({"query": [True], "items": [[1]]}, r"query\[0\] is True", "query[0]"),
        ({"query": [1], "items": [3]}, r"items\[0\]=3 is neither text nor", "items[0]"),
        ({"query": [], "items": [[5], []]}, r"items\[1\] has no tokens", "items[1]"),
        ({"suffix": [3]}, "query is text but suffix is not", "suffix"),
        ({"items": 7}, "items=7 is no list", "items"),
        ({"items": ["a"] * 4097}, "4097 items; the limit is 4096", "items"),
        ({"suffix": None}, "suffix=None is neither text nor token ids", "suffix"),
        ({"item_first": "no"}, "item_first='no' is no bool", "item_first"),
        ({"normalize": "x"}, "normalize='x' is not known", "normalize"),
        ({"label_normalization": None}, "label_normalization=None", "label_normalization"),
        ({"long_items": "drop"}, "long_items='drop' is not known", "long_items"),
        ({"labels": ["r", "ran"], "strict_labels": True}, "begin label 'ran'", "labels"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_names_its_place(tiny, changes, message, param):
    arguments = {"query": "q", "items": ["a", "b"], "labels": LABELS} | changes
    with pytest.raises(ArgumentError, match=message) as error:
        tiny.score(**arguments)
    assert isinstance(error.value, ValueError)
    assert error.value.param == param if param else error.value.param in message.replace("\\", "")


def test_control_tokens_are_read_in_query_and_suffix_but_not_in_items(tiny):
    name = tiny.tokenizer.token_text(BOS)
    query = tiny.encode(f"a{name}b", parse_special=True)
    assert BOS in query
    plain = tiny.tokenizer.encode_inner(f"x{name}")
    assert BOS not in plain
    suffix = tiny.encode(name, parse_special=True)
    labels = [tiny.tokenizer.encode_inner(label) for label in LABELS]
    output = tiny.score(f"a{name}b", [f"x{name}"], LABELS, suffix=name)
    expected = alone(tiny, [*tiny.tokenizer.with_bos(query), *plain, *suffix], labels)
    assert_near(output.logprobs[0], expected)


def test_the_default_model_scores_as_alone(default_model):
    query = "Is this a fruit? Answer Yes or No.\nWord: "
    items = ["apple", "a heavy hammer", "banana", "the moon", "two ripe cherries"]
    suffix = "\nAnswer:"
    with LLM(default_model, device="cpu", dtype="float32", max_model_len=512) as llm:
        output = llm.score(query, items, [" Yes", " No", " Not at all"], suffix=suffix)
        tokenizer = llm.tokenizer
        labels = [tokenizer.encode_inner(text) for text in (" Yes", " No", " Not at all")]
        tail = llm.encode(suffix, parse_special=True)
        for item, own in zip(items, output.logprobs, strict=True):
            ids = [*tokenizer.with_bos(llm.encode(query, parse_special=True))]
            ids += [*tokenizer.encode_inner(item), *tail]
            assert_near(own, alone(llm, ids, labels))


def test_lengths_count_as_if_each_item_were_alone():
    """The packed length may exceed the context by far; an item after the query may not."""
    with open_tiny(max_model_len=40) as llm:
        query = QUERY[:30]
        fits = [[1] * 10] * 20
        assert np.isfinite(llm.score(query, fits, label_token_ids=IDS).logprobs).all()
        with pytest.raises(ContextLengthError, match=r"items\[1\] has 11 tokens.* of 30") as error:
            llm.score(query, [[1], [1] * 11], label_token_ids=IDS)
        assert error.value.param == "items[1]"
        with pytest.raises(ContextLengthError, match=r"items\[0\] has 10 .* 1 of suffix and label"):
            llm.score("x" * 29, ["x" * 10], ["xa"])
        with pytest.raises(ContextLengthError, match=r"query has 40 tokens .* holds 40"):
            llm.score(QUERY[:40], [[1]], label_token_ids=IDS)
        with pytest.raises(ContextLengthError, match="query has 999999 characters"):
            llm.score("x" * 999999, ["a"], ["a"])
        assert_idle(llm)


def test_one_overlong_item_never_fails_the_list():
    with open_tiny(max_model_len=40) as llm:
        query, items = QUERY[:30], [[1, 2], [*range(25)], [3]]
        expected = llm.score(query, [items[0], items[1][:10], items[2]], label_token_ids=IDS)
        skipped = llm.score(query, items, label_token_ids=IDS, long_items="skip")
        cut = llm.score(query, items, label_token_ids=IDS, long_items="cut")
    assert_near(cut.logprobs, expected.logprobs)
    assert not cut.errors
    assert_near(skipped.logprobs[[0, 2]], expected.logprobs[[0, 2]])
    assert np.isnan(skipped.logprobs[1]).all()
    assert list(skipped.errors) == [1]
    assert "items[1] has 25 tokens" in skipped.errors[1]


def test_ids_that_are_no_tokens_take_no_probability(tmp_path):
    """A vocabulary is padded in the file: the padding is left out of the sum."""
    path = tiny_model(tmp_path / "m.gguf")
    with open_tiny(path) as llm:
        every = list(range(llm.tokenizer.vocab_size))
        padding = set(llm.tokenizer.unused_ids)
        real = [i for i in every if i not in padding]
        output = llm.score(QUERY, ITEMS[:3], label_token_ids=real)
        llm._engine.runner.sampler.is_banned[real[:50]] = 1
        fewer = llm.score(QUERY, ITEMS[:3], label_token_ids=real[50:])
    assert_near(output.probs.sum(axis=1), np.ones(3), 1e-5)
    assert_near(fewer.probs.sum(axis=1), np.ones(3), 1e-5)
