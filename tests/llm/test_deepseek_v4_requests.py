"""Requests to DeepSeek-V4: scoring, the shortest and longest, few and all experts, and faults."""

import numpy as np
import pytest
import torch

from tests.dsv4_engine import (
    BLOCK,
    TOLERANCE,
    VOCAB,
    assert_true,
    open_v4,
    poison_new_blocks,
    random_ids,
    tiny_model,
    whole_logits,
)
from tests.dsv4_files import NUM_EXPERTS, released_tensors, save_folder
from tests.tiny_llm import assert_idle, greedy
from tiercel.errors import ArgumentError, ContextLengthError, InvalidRequestError
from tiercel.faults import Faults

LABELS = [3, 50, 130]
QUERY = random_ids(140, seed=5)
ITEMS = [random_ids(count, seed=count) for count in (1, 5, 12, 130)]


@pytest.fixture(scope="module")
def llm():
    with open_v4(max_num_batched_tokens=200, max_num_seqs=4) as opened:
        poison_new_blocks(opened)
        yield opened
        assert_idle(opened)


# ---- scoring


@pytest.mark.parametrize("length", [140, 128, 7, 0])
def test_items_behind_a_query_score_as_alone(llm, length):
    query = QUERY[:length]
    llm._engine.forget()
    wanted = [
        whole_logits(tiny_model(), [*query, *item])[-1].log_softmax(0)[LABELS] for item in ITEMS
    ]
    for number in range(2):
        output = llm.score(query, ITEMS, label_token_ids=LABELS)
        np.testing.assert_allclose(output.logprobs, torch.stack(wanted), atol=2 * TOLERANCE, rtol=0)
        assert output.usage.mode == "separate"
        assert output.usage.prompt_tokens == length + sum(map(len, ITEMS))
        # The tokens that are computed on a hit leave the query's only block to longer prompts.
        assert output.usage.cached_tokens in ({0} if number == 0 or length < BLOCK else {0, BLOCK})


def test_items_share_the_blocks_of_their_query(llm):
    scheduler = llm._engine.scheduler
    llm._engine.forget()
    output = llm.score(QUERY, [[*item, *QUERY[:20]] for item in ITEMS], label_token_ids=LABELS)
    assert scheduler.prefix_hits == (len(ITEMS) - 1) * BLOCK
    assert output.usage.mode == "separate"


def test_an_item_may_come_before_the_query(llm):
    output = llm.score(QUERY[:20], ITEMS, label_token_ids=LABELS, item_first=True)
    wanted = [
        whole_logits(tiny_model(), [*item, *QUERY[:20]])[-1].log_softmax(0)[LABELS]
        for item in ITEMS
    ]
    np.testing.assert_allclose(output.logprobs, torch.stack(wanted), atol=2 * TOLERANCE, rtol=0)
    assert output.usage.mode == "separate"


def test_labels_among_each_other_need_their_rows_of_the_head(llm):
    plain = llm.score(QUERY, ITEMS, label_token_ids=LABELS).logprobs
    output = llm.score(QUERY, ITEMS, label_token_ids=LABELS, normalize="labels")
    np.testing.assert_allclose(np.diff(output.logprobs), np.diff(plain), atol=2e-4, rtol=0)
    np.testing.assert_allclose(output.probs.sum(1), np.ones(len(ITEMS)), atol=1e-5)


# ---- sizes


def test_requests_of_one_token(llm):
    outputs = llm.generate(
        [{"prompt_token_ids": [token]} for token in (0, 1, 77, VOCAB - 1)], greedy(3, logprobs=1)
    )
    assert_true(outputs)


def test_the_longest_context_is_reached():
    ids = random_ids(250, seed=6)
    for spec in ("off", "mtp"):
        with open_v4(max_model_len=256, spec=spec, num_spec_tokens=4) as llm:
            poison_new_blocks(llm)
            llm._engine.runner.sampler._theta.zero_()
            (output,) = llm.generate({"prompt_token_ids": ids}, greedy(6, logprobs=1))
            assert len(output.outputs[0].token_ids) == 6
            assert_true([output])
            assert llm.logits(random_ids(256)).shape == (256, VOCAB)
            with pytest.raises(ContextLengthError):
                llm.generate({"prompt_token_ids": random_ids(257)}, greedy(1))
            assert_idle(llm)


def experts_of(tmp_path, table):
    """The checkpoint with another table of experts in its hash-routed layers."""
    tensors = released_tensors()
    for name, tensor in tensors.items():
        if name.endswith("tid2eid"):
            tensors[name] = table.to(tensor.dtype)
    return save_folder(tmp_path, tensors)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_experts_with_no_token_one_token_and_all_tokens(tmp_path, count):
    """Every token goes to expert 2, one id alone to expert 4, and none to expert 0."""
    table = torch.tensor([[2, 5]]).repeat(VOCAB, 1)
    table[9] = torch.tensor([4, 2])
    ids = [10 + number % 100 for number in range(count)]
    ids[0] = 9
    model = tiny_model(experts_of(tmp_path, table))
    wanted = torch.cat(
        [whole_logits(model, ids[: stop + 1])[-1:] for stop in range(len(ids))]
    )  # the last token's, by itself among its context
    torch.testing.assert_close(whole_logits(model, ids), wanted, atol=TOLERANCE, rtol=0)
    assert not torch.allclose(wanted, whole_logits(tiny_model(), ids), atol=0.01)
    moe = model.layers[0].moe
    x = torch.randn(count, model.config.hidden_size)
    chosen, weights = moe.router(moe.router.gate(x), torch.tensor(ids, dtype=torch.int32))
    assert chosen.sort(1).values.tolist() == table[ids].sort(1).values.tolist()
    assert set(range(NUM_EXPERTS)) - set(chosen.flatten().tolist()) >= {0, 1, 3}
    torch.testing.assert_close(weights.sum(1), torch.full((count,), 2.5))


# ---- bad input and faults


@pytest.mark.parametrize("ids", [[VOCAB], [-1], [5, 2**31]])
def test_an_id_outside_the_vocabulary_is_an_error_of_its_request(llm, ids):
    with pytest.raises(InvalidRequestError, match=str(ids[-1])):
        llm.generate({"prompt_token_ids": ids}, greedy(2))
    with pytest.raises(ArgumentError, match=rf"is {ids[-1]}\."):
        llm.score(QUERY, [ids], label_token_ids=LABELS)


@pytest.mark.parametrize("spec", ["off", "mtp"])
def test_nan_logits_end_one_request_and_the_others_go_on(spec):
    """Its blocks are zeroed; a request that gets them later is not touched."""
    prompts = [random_ids(count, seed=count) for count in (130, 140, 20)]
    with open_v4(spec=spec, max_num_seqs=4) as llm:
        llm._engine.runner.faults = Faults.parse("nan:1@4", is_enabled=True)
        requests = [llm._inputs.request(ids, greedy(12), 0) for ids in prompts]
        engine = llm._engine
        for request in requests:
            engine.submit(request)
        held = []
        while engine.has_work:
            if requests[1].block_ids and requests[1].block_ids[0]:
                held = [list(blocks) for blocks in requests[1].block_ids]
            engine.step()
        assert [request.finish_reason for request in requests] == ["length", "error", "length"]
        for pool, blocks in zip(engine.runner.pools, held, strict=True):
            own = [block for block in blocks if block]
            engine_planes = [plane for layer in pool.layers.values() for plane in layer.values()]
            assert own
            assert all(not bool(plane[own].any()) for plane in engine_planes)
        assert_idle(llm)
        after = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy(5, logprobs=1))
        assert_true(after)
    for request in (requests[0], requests[2]):
        assert len(request.output_token_ids) == 12
