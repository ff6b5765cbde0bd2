"""`LLM.stream`: deltas, leaving early, several streams side by side."""

import pytest

from tests.tiny_llm import DATA, NAMES, PROMPTS, assert_idle, greedy, ids_of, joined, open_tiny
from tiercel.params import SamplingParams


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
