"""What ends an answer of `LLM`: stop tokens and stop strings."""

import pytest

from tests.tiny_llm import EOS, greedy
from tiercel.params import SamplingParams


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


def test_a_stop_string_ends_a_stream(llm):
    params = greedy(40, stop=["ab", "ba"], **spelled(llm, "ab"))
    (whole,) = llm.generate("the", params)
    deltas = list(llm.stream("the", params))
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert deltas[-1].stop_reason == whole.outputs[0].stop_reason
    assert sum(len(delta.token_ids) for delta in deltas) == len(whole.outputs[0].token_ids)
