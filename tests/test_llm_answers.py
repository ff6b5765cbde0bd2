"""Answers of the Python API: tokens, ends, pieces, log-probabilities, alone and together."""

import numpy as np
import pytest

from tests.gguf_files import NUM_TOKENS, tiny_model
from tests.parity import log_softmax
from tests.tiny_llm import DATA, EOS, NAMES, PROMPTS, assert_idle, greedy, ids_of, joined, open_tiny
from tiercel.engine import build as engine_module
from tiercel.errors import OutOfMemoryError
from tiercel.models.decoder import Decoder
from tiercel.params import SamplingParams
from tiercel.runner import prompt_readback as reads_module


@pytest.fixture(scope="module")
def llm():
    with open_tiny() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _nothing_stays_behind(request):
    """After each test on the shared model, all blocks and rows are free."""
    yield
    if "llm" in request.fixturenames:
        assert_idle(request.getfixturevalue("llm"))


RANDOM = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}


def test_answers_of_one_prompt(llm):
    params = SamplingParams(n=4, seed=3, **RANDOM)
    (output,) = llm.generate("the thin man", params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    answers = ids_of([output])[0]
    assert len({tuple(answer) for answer in answers}) == 4
    assert ids_of(llm.generate("the thin man", params)) == [answers]
    fewer = SamplingParams(n=2, seed=3, **RANDOM)
    assert ids_of(llm.generate("the thin man", fewer)) == [answers[:2]]
    others = llm.generate("the thin man", SamplingParams(n=4, seed=4, **RANDOM))
    assert all(a != b for a, b in zip(ids_of(others)[0], answers, strict=True))


def test_alone_is_as_in_a_batch(llm):
    params = [SamplingParams(n=1 + i % 3, seed=i, **RANDOM) for i in range(len(PROMPTS))]
    together = llm.generate(PROMPTS, params)
    alone = [llm.generate(p, own)[0] for p, own in zip(PROMPTS, params, strict=True)]
    assert ids_of(together) == ids_of(alone)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_mixed_lengths_equals_one_by_one(name):
    prompts = [{"prompt_token_ids": [5 + i] * length} for i, length in enumerate((1, 3, 64, 65, 9))]
    params = [greedy(length) for length in (20, 1, 7, 70, 12)]
    with open_tiny(DATA / f"{name}.gguf") as llm:
        together = llm.generate(prompts, params)
        alone = [llm.generate(p, own)[0] for p, own in zip(prompts, params, strict=True)]
    assert ids_of(together) == ids_of(alone)
    with open_tiny(DATA / f"{name}.gguf", max_num_batched_tokens=5, max_num_seqs=2) as llm:
        assert ids_of(llm.generate(prompts, params)) == ids_of(alone)
        assert_idle(llm)


def with_few_blocks(monkeypatch, num_blocks, **options):
    monkeypatch.setattr(Decoder, "block_size", 8)
    monkeypatch.setattr(engine_module, "cache_blocks", lambda groups, **sizes: [num_blocks])
    llm = open_tiny(max_model_len=64, **options)
    preempt, counted = llm._engine.scheduler._preempt, []
    llm._engine.scheduler._preempt = lambda request: (counted.append(1), preempt(request))
    return llm, counted


def test_preemption_changes_no_answer(monkeypatch):
    params = SamplingParams(
        temperature=1.0, seed=1, n=2, max_tokens=30, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    prompts = [{"prompt_token_ids": list(range(i, i + 12))} for i in range(4)]
    outputs = {}
    for num_blocks in (100, 9):
        llm, counted = with_few_blocks(monkeypatch, num_blocks, max_num_batched_tokens=16)
        outputs[num_blocks] = llm.generate(prompts, params)
        assert bool(counted) == (num_blocks == 9)
        assert_idle(llm)
    for ample, tight in zip(outputs[100], outputs[9], strict=True):
        assert ids_of([ample]) == ids_of([tight])
        assert len(tight.prompt_logprobs) == len(ample.prompt_logprobs) == 12
        for mine, theirs in zip(tight.prompt_logprobs[1:], ample.prompt_logprobs[1:], strict=True):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        for mine, theirs in zip(tight.outputs, ample.outputs, strict=True):
            assert [entry.token_id for entry in mine.logprobs] == mine.token_ids
            assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)


def test_preemption_changes_no_logits(monkeypatch):
    llm, counted = with_few_blocks(monkeypatch, 9, max_num_batched_tokens=5)
    ids = list(range(40))
    expected = llm.logits(ids)
    assert not counted
    for i, _ in enumerate(llm.stream({"prompt_token_ids": [5] * 8}, greedy(50))):
        if i == 10:  # the stream is older: the prompt is preempted half done
            logits = llm.logits(ids)
    assert counted
    np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=1e-4, equal_nan=False)


def test_a_request_that_can_never_fit_leaves_nothing_behind(monkeypatch):
    llm, _ = with_few_blocks(monkeypatch, 5)
    with pytest.raises(OutOfMemoryError, match="need 44 tokens of cache but it holds 32"):
        llm.generate([{"prompt_token_ids": [1] * 4}, {"prompt_token_ids": [1] * 40}], greedy(4))
    assert_idle(llm)
    assert len(llm.generate("a", greedy(4))[0].outputs[0].token_ids) == 4


def test_the_models_own_stop_token(llm):
    wants_eos = {"temperature": 0, "max_tokens": 6, "logit_bias": {EOS: 100.0}}
    (output,) = llm.generate("a", SamplingParams(**wants_eos))
    answer = output.outputs[0]
    assert (answer.token_ids, answer.text) == ([EOS], "")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", EOS)
    (output,) = llm.generate("a", SamplingParams(ignore_eos=True, **wants_eos))
    assert output.outputs[0].token_ids == [EOS] * 6
    assert (output.outputs[0].finish_reason, output.outputs[0].text) == ("length", "")
    (output,) = llm.generate("a", SamplingParams(min_tokens=3, **wants_eos))
    assert EOS not in output.outputs[0].token_ids[:3]
    assert output.outputs[0].token_ids[3:] == [EOS]


def test_stop_token_ids(llm):
    ids = llm.generate("the thin man", greedy(12))[0].outputs[0].token_ids
    place = next(i for i in range(1, 12) if ids[i] not in ids[:i])
    (output,) = llm.generate("the thin man", greedy(12, stop_token_ids=[ids[place]]))
    answer = output.outputs[0]
    assert answer.token_ids == ids[: place + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", ids[place])
    assert answer.text == llm.decode(ids[:place])


def spelled(llm, text):
    """Parameters under which a greedy answer is the letters of `text`, repeatedly."""
    return {"allowed_token_ids": sorted({llm.encode(letter)[0] for letter in text})}


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(llm, include):
    letters = spelled(llm, "abcdefgh")
    full = llm.generate("the", greedy(40, **letters))[0].outputs[0].text
    assert len(full) == 40
    stop = full[10:13]
    start = full.index(stop)
    (output,) = llm.generate(
        "the", greedy(40, stop=[stop, "zz"], include_stop_str_in_output=include, **letters)
    )
    answer = output.outputs[0]
    assert answer.text == full[: start + 3 * include]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert len(answer.token_ids) == start + 3
    (output,) = llm.generate("the", greedy(40, stop=["zz"], **letters))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (full, "length")


def test_without_text(llm):
    (output,) = llm.generate("a", greedy(5, detokenize=False))
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 5


def test_all_banned_is_an_error_of_that_answer(llm):
    stuck = greedy(allowed_token_ids=[7], logit_bias={7: -100})
    bad, good = llm.generate(["a", "a"], [stuck, greedy()])
    answer = bad.outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("error", "no_valid_token")
    assert (answer.token_ids, answer.text) == ([], "")
    assert ids_of([good]) == ids_of(llm.generate("a", greedy()))


def test_ids_that_stand_for_nothing_are_never_generated():
    with open_tiny(DATA / "gemma3-tiny.gguf") as llm:
        unused = llm.tokenizer.unused_ids
        assert unused
        params = SamplingParams(n=8, max_tokens=20, logit_bias=dict.fromkeys(unused, 50.0))
        (output,) = llm.generate("the", params)
    assert not set(unused) & {i for answer in output.outputs for i in answer.token_ids}


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory):
    """A model whose embedding of token 7 is NaN."""
    embedding = np.random.default_rng(0).normal(size=(NUM_TOKENS, 64))
    embedding[7] = np.nan
    path = tmp_path_factory.mktemp("broken") / "m.gguf"
    return tiny_model(path, tensors={"token_embd.weight": embedding})


@pytest.mark.reliability
def test_nan_weights_end_as_errors_and_touch_no_neighbour(broken_model):
    with open_tiny(broken_model) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in ([5, 6], [5, 7, 6], [8, 9, 10])]
        params = greedy(6, logprobs=1, prompt_logprobs=0)
        good, bad, other = llm.generate(prompts, params)
        answer = bad.outputs[0]
        assert (answer.finish_reason, answer.stop_reason) == ("error", "nonfinite_logits")
        assert (answer.token_ids, answer.text, answer.logprobs) == ([], "", [])
        assert bad.prompt_logprobs is None
        assert ids_of([good, other]) == ids_of(llm.generate(prompts[::2], params))
        (delta,) = llm.stream(prompts[1], params)
        assert (delta.finish_reason, delta.stop_reason) == ("error", "nonfinite_logits")
        assert (delta.token_ids, delta.text, delta.logprobs) == ([], "", None)
        # NaN is also met in the middle of an answer.
        (later,) = llm.generate(prompts[0], greedy(6, allowed_token_ids=[7]))
        assert (later.outputs[0].token_ids, later.outputs[0].finish_reason) == ([7], "error")
        assert_idle(llm)


@pytest.mark.reliability
def test_nonfinite_logits_inside_the_prompt_are_an_error(llm, monkeypatch):
    def broken(logits, token_ids, count):
        logits[1:2] = float("inf")  # of one position; the last position is finite
        return right(logits, token_ids, count)

    right = reads_module.top_logprobs
    monkeypatch.setattr(reads_module, "top_logprobs", broken)
    (output,) = llm.generate("the thin man", greedy(3, prompt_logprobs=1))
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].stop_reason == "nonfinite_logits"
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("name", NAMES)
def test_stream_pieces_join_to_what_generate_gives(name):
    with open_tiny(DATA / f"{name}.gguf") as llm:
        for seed in range(4):
            params = SamplingParams(n=2, seed=seed, logprobs=1, temperature=1.0, max_tokens=25)
            (whole,) = llm.generate("the thin man", params)
            deltas = list(llm.stream("the thin man", params))
            for answer in whole.outputs:
                own = [delta for delta in deltas if delta.index == answer.index]
                assert "".join(delta.text for delta in own) == answer.text
                assert joined(own, "token_ids") == answer.token_ids
                assert joined(own, "logprobs") == answer.logprobs
                assert [delta.finish_reason for delta in own[:-1]] == [None] * (len(own) - 1)
                assert own[-1].finish_reason == answer.finish_reason
                assert own[-1].stop_reason == answer.stop_reason
        assert_idle(llm)


def test_a_stop_string_ends_a_stream(llm):
    params = greedy(40, stop=["ab", "ba"], **spelled(llm, "ab"))
    (whole,) = llm.generate("the", params)
    deltas = list(llm.stream("the", params))
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert deltas[-1].stop_reason == whole.outputs[0].stop_reason
    assert sum(len(delta.token_ids) for delta in deltas) == len(whole.outputs[0].token_ids)


def test_leaving_a_stream_early_frees_everything(llm):
    for _ in llm.stream("the thin man", greedy(500, logprobs=None)):
        break
    assert_idle(llm)
    stream = llm.stream("the thin man", greedy(500))
    next(stream)
    assert llm._engine.has_work
    stream.close()
    assert_idle(llm)
    llm.stream("the thin man", greedy(500))  # never started
    assert_idle(llm)


def test_an_error_in_the_readers_loop_frees_everything(llm):
    def read():
        for i, _ in enumerate(llm.stream("the thin man", greedy(500))):
            1 / (2 - i)

    with pytest.raises(ZeroDivisionError):
        read()
    assert_idle(llm)


def test_calls_inside_a_streams_loop(llm):
    """A reader may generate something else between two pieces; neither affects the other."""
    params = SamplingParams(seed=5, logprobs=0, max_tokens=30, ignore_eos=True)
    (whole,) = llm.generate("the thin man", params)
    expected = ids_of(llm.generate(PROMPTS, greedy(4)))
    deltas = []
    for i, delta in enumerate(llm.stream("the thin man", params)):
        deltas.append(delta)
        if i % 4 == 0:
            assert ids_of(llm.generate(PROMPTS, greedy(4))) == expected
        if i % 4 == 2:
            assert llm.logits([5, 6]).shape == (2, 272)
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert joined(deltas, "token_ids") == whole.outputs[0].token_ids
    for mine, theirs in zip(joined(deltas, "logprobs"), whole.outputs[0].logprobs, strict=True):
        assert mine.token_id == theirs.token_id
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_two_streams_side_by_side(llm):
    params = [SamplingParams(seed=i, max_tokens=length) for i, length in enumerate((25, 9))]
    expected = [llm.generate("the thin man", own)[0].outputs[0].text for own in params]
    texts = ["", ""]
    streams = {i: llm.stream("the thin man", own) for i, own in enumerate(params)}
    while streams:
        for i in list(streams):
            delta = next(streams[i], None)
            if delta is None:
                del streams[i]
            else:
                texts[i] += delta.text
    assert texts == expected
    first, second = llm.stream("a", greedy(50)), llm.stream("b", greedy(50))
    next(first)
    next(second)
    first.close()
    assert sum(len(delta.token_ids) for delta in second) == 49


def test_logprobs_are_those_of_the_logits(llm):
    params = SamplingParams(
        seed=2, max_tokens=10, ignore_eos=True, logprobs=3, prompt_logprobs=2, temperature=0.8
    )
    (output,) = llm.generate("the thin man", params)
    answer, prompt = output.outputs[0], output.prompt_token_ids
    expected = log_softmax(llm.logits(prompt + answer.token_ids))
    assert output.prompt_logprobs[0] is None
    entries = output.prompt_logprobs[1:] + answer.logprobs
    for place, entry in enumerate(entries):
        assert entry.token_id == (prompt + answer.token_ids)[place + 1]
        assert entry.logprob == pytest.approx(expected[place, entry.token_id], abs=1e-4)
        assert len(entry.top) == (2 if place < len(prompt) - 1 else 3)
        values = [logprob for _, logprob in entry.top]
        assert values == sorted(values, reverse=True)
        assert values[0] == pytest.approx(expected[place].max(), abs=1e-4)
        for token_id, logprob in entry.top:
            assert logprob == pytest.approx(expected[place, token_id], abs=1e-4)
    assert answer.cumulative_logprob == pytest.approx(sum(e.logprob for e in answer.logprobs))


def test_logprobs_are_none_unless_asked_for(llm):
    (output,) = llm.generate("a", greedy(3))
    answer = output.outputs[0]
    assert (output.prompt_logprobs, answer.logprobs, answer.cumulative_logprob) == (None,) * 3
    (output,) = llm.generate("a", greedy(3, logprobs=0))
    assert [entry.top for entry in output.outputs[0].logprobs] == [()] * 3


@pytest.mark.parametrize("chunk", [1, 2, 5, 2048])
def test_prompt_logprobs_of_any_length_in_any_chunks(llm, chunk):
    ids = llm.encode("the thin man", add_special_tokens=True)
    (whole,) = llm.generate({"prompt_token_ids": ids}, greedy(2, prompt_logprobs=1))
    with open_tiny(max_num_batched_tokens=chunk) as other:
        for length in range(1, len(ids) + 1):
            prompt = {"prompt_token_ids": ids[:length]}
            (output,) = other.generate(prompt, greedy(2, prompt_logprobs=1))
            assert len(output.prompt_logprobs) == length
            pairs = zip(output.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=False)
            for mine, theirs in pairs:
                assert mine.token_id == theirs.token_id
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_logits_do_not_depend_on_chunks(name):
    ids = np.random.default_rng(3).integers(0, 256, 300).tolist()
    with open_tiny(DATA / f"{name}.gguf") as llm:
        whole = llm.logits(ids)
        assert (whole.shape, whole.dtype) == ((300, 272), np.float32)
        np.testing.assert_allclose(
            llm.logits(ids[:70]), whole[:70], atol=2e-4, rtol=1e-4, equal_nan=False
        )
    for chunk in (3, 64, 100):
        with open_tiny(DATA / f"{name}.gguf", max_num_batched_tokens=chunk) as llm:
            np.testing.assert_allclose(
                llm.logits(ids), whole, atol=2e-4, rtol=1e-4, equal_nan=False
            )
            assert_idle(llm)


def test_logits_of_a_whole_context_in_a_cache_for_one():
    with open_tiny(max_model_len=128, max_num_seqs=1) as llm:
        assert llm.logits([5] * 128).shape == (128, 272)
        assert_idle(llm)
