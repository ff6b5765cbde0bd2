"""DeepSeek-V4 gives the results of the independent reference, in every naming and format."""

import numpy as np
import pytest
import torch

from tests.dsv4_engine import (
    TOLERANCE,
    TRACED,
    Steps,
    draft_states,
    evened,
    expected,
    logits_of,
    open_v4,
    tiny_model,
    watched,
)
from tests.dsv4_files import NUM_LAYERS, WITHOUT_MTP, WRITERS, write_compressed_tensors, write_nvfp4
from tests.tiny_llm import assert_idle, greedy

PROMPTS = (0, 1, 2)
WAYS_TO_CUT = ([270], [7, 1, 128, 4, 131, 2], [127, 2, 100, 41])


def prompt(number):
    return expected()[f"p{number}.tokens"].tolist()


def assert_near(actual, wanted, atol=TOLERANCE):
    torch.testing.assert_close(torch.as_tensor(actual), wanted, atol=atol, rtol=0)


@pytest.fixture(scope="module")
def llm():
    with open_v4() as opened:
        yield opened
        assert_idle(opened)


@pytest.mark.parametrize("number", PROMPTS)
def test_logits_are_those_of_the_reference(llm, number):
    assert_near(llm.logits(prompt(number)), expected()[f"p{number}.logits"])


@pytest.mark.parametrize("number", PROMPTS)
def test_greedy_answers_are_those_of_the_reference(llm, number):
    (output,) = llm.generate({"prompt_token_ids": prompt(number)}, greedy(16))
    assert output.outputs[0].token_ids == expected()[f"p{number}.greedy"].tolist()


@pytest.mark.parametrize("chunks", WAYS_TO_CUT, ids=str)
@pytest.mark.parametrize("number", PROMPTS)
def test_logits_and_mtp_logits_in_chunks(number, chunks):
    """The head sees each position with the token after it, in the chunks of the model."""
    model, ids = tiny_model(), prompt(number)
    steps, logits, drafted = Steps(model, [ids]), [], []
    for count in evened(ids, chunks):
        batch, hidden = steps.step({0: count})
        logits.append(logits_of(model, hidden))
        last = int(steps.computed[0])
        following = torch.tensor([*ids[last - count + 1 : last + 1], 0][:count], dtype=torch.int32)
        drafted.append(draft_states(model, batch, hidden, following))
    assert_near(torch.cat(logits), expected()[f"p{number}.logits"])
    with torch.inference_mode():
        mtp_logits = model.draft_head.logits(torch.cat(drafted))[:-1]
    assert_near(mtp_logits, expected()[f"p{number}.mtp_logits"])


@pytest.mark.parametrize("chunks", [[40], [32, 8]], ids=str)
def test_layers_give_the_traces_of_the_reference(chunks):
    model, ids = tiny_model(), prompt(1)
    steps, parts = Steps(model, [ids]), []
    for count in chunks:
        parts.append({})
        with watched(parts[-1]):
            steps.step({0: count})
    for layer in range(NUM_LAYERS):
        for name in ("streams", "attn_out", "ffn_out", "ffn.route_ids"):
            wanted = expected()[f"trace.layers.{layer}.{name}"]
            found = torch.cat([part[f"layers.{layer}.{name}"] for part in parts])[TRACED]
            if name == "ffn.route_ids":  # in any order
                assert torch.equal(found.sort(1).values, wanted.sort(1).values)
            else:
                assert_near(found, wanted)


@pytest.mark.parametrize("number", PROMPTS)
def test_the_proposer_drafts_what_the_reference_drafts(monkeypatch, number):
    """The drafts after a prompt, and the logits that each comes from."""
    wanted = expected()[f"p{number}.draft_tokens"].tolist()
    with open_v4(spec="mtp", num_spec_tokens=3) as llm:
        engine, seen = llm._engine, []
        head = engine.runner.model.draft_head
        engine.runner.sampler._theta.zero_()  # draft whatever is expected of it
        logits = type(head).logits

        def watch(self, hidden):
            seen.append(logits(self, hidden).clone())
            return seen[-1]

        monkeypatch.setattr(type(head), "logits", watch)
        request = llm._inputs.request(prompt(number), greedy(8), 0)
        collect, drafts = engine.runner.collect, []

        def collected(launch):
            results = collect(launch)
            drafts.extend([*result.token_ids, *result.next_drafts] for result in results.values())
            return results

        engine.runner.collect = collected
        engine.submit(request)
        while not request.output_token_ids:
            engine.step()
        engine.abort(request)
    assert drafts[0] == wanted
    assert_near(torch.cat(seen[:3]), expected()[f"p{number}.draft_logits"])


@pytest.mark.parametrize("write", [write_nvfp4, write_compressed_tensors])
def test_experts_of_nvfp4_beside_mxfp4(tmp_path, write):
    with open_v4(write(tmp_path)) as llm:
        logits = llm.logits(prompt(1))
    assert_near(logits, expected()["nvfp4.p1.logits"])


def test_native_numerics_choose_the_same_token():
    """The reference keeps its vectors in float32; sums in another order may flip a rounding."""
    with open_v4(numerics="native", kv_dtype="float32") as llm:
        last = torch.as_tensor(llm.logits(prompt(0))[-1])
    wanted = expected()["native.p0.logits_last"][0]
    assert last.argmax() == wanted.argmax()
    assert torch.cosine_similarity(last, wanted, dim=0) > 0.999
    exact = expected()["p0.logits"][-1]
    assert torch.cosine_similarity(last, exact, dim=0) < 0.999


@pytest.mark.parametrize(("kv_dtype", "least"), [("bf16", 0.9999), ("fp8", 0.98)])
@pytest.mark.parametrize("number", PROMPTS)
def test_a_rounded_cache_changes_little(number, kv_dtype, least):
    """At most positions: at few of them, another expert or entry is chosen."""
    with open_v4(kv_dtype=kv_dtype) as llm:
        logits = torch.as_tensor(llm.logits(prompt(number)))
    near = torch.cosine_similarity(logits, expected()[f"p{number}.logits"])
    assert near.median() > least
    assert near.min() > 0.7
    assert near.max() < 1 - 1e-7


@pytest.mark.parametrize("name", WRITERS)
def test_every_naming_gives_the_same_logits(tmp_path, name):
    path = WRITERS[name](tmp_path)
    if name in WITHOUT_MTP:
        with open_v4(path) as llm:
            assert_near(llm.logits(prompt(0)), expected()["p0.logits"])
        return
    model = tiny_model(path)
    ids = prompt(0)
    batch, hidden = Steps(model, [ids]).step({0: len(ids)})
    assert_near(logits_of(model, hidden), expected()["p0.logits"])
    with torch.inference_mode():
        following = torch.tensor([*ids[1:], 0], dtype=torch.int32)
        mtp_logits = model.draft_head.logits(draft_states(model, batch, hidden, following))[:-1]
    assert_near(mtp_logits, expected()["p0.mtp_logits"])


def test_formats_that_hold_the_weights_exactly_give_the_same_bits(tmp_path):
    """FP4 values and powers of two are exact in all of them; the same products follow."""
    ids = prompt(1)
    found = {}
    for name in ("released", "prefixed", "scale_inv", "sharded"):
        with open_v4(WRITERS[name](tmp_path / name)) as llm:
            found[name] = llm.logits(ids)
    for name, logits in found.items():
        np.testing.assert_array_equal(logits, found["released"], err_msg=name)
