"""The text of an answer: joined pieces equal the whole, stops are cut, nothing is held too long."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.params import SamplingParams
from tiercel.request.request import Request, TokenLogprobs
from tiercel.request.text_stream import TextStream

EOS, NAMED = 256, 257


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 is the control token <end>, 257 spells a whole word."""

    strips_leading_space = True
    vocab_size = 258

    def token_bytes(self, token_id, *, with_special=False):
        if token_id == EOS:
            return b"<end>" if with_special else b""
        return b" word" if token_id == NAMED else bytes([token_id])


def run(ids, params, reason="length", stop_reason=None):
    """Push ids one by one, as the engine does; returns pieces, and how the request ended."""
    request = Request("r", [1], params, 0, 0, frozenset({EOS, *params.stop_token_ids}), len(ids))
    text = TextStream(request, ByteTokenizer())
    pieces = []
    for i, token_id in enumerate(ids):
        request.output_token_ids.append(token_id)
        if i == len(ids) - 1:
            request.finish_reason, request.stop_reason = reason, stop_reason
        pieces.append(text.push((token_id,)))
        if text.matched is not None:
            break
    assert text.text == "".join(pieces)
    return pieces, text


def ids_of(text):
    return list(text.encode())


def expected_text(text, stop, min_tokens, *, include):
    """The rule on the whole (ASCII) text; matches are looked for after `min_tokens`."""
    found = [(text.find(s, min_tokens), rank) for rank, s in enumerate(stop)]
    found = [(start, rank) for start, rank in found if start >= 0]
    if not found:
        return text, None
    start, rank = min(found)
    return text[: start + len(stop[rank]) * include], stop[rank]


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", min_size=1, max_size=16),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_stop_strings_are_cut_however_they_fall_into_tokens(text, stop, include, min_tokens):
    params = SamplingParams(
        stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None
    )
    _, output = run(ids_of(text), params)
    assert (output.text, output.matched) == expected_text(text, stop, min_tokens, include=include)


@pytest.mark.parametrize("cut", range(1, 13))
def test_a_stop_string_split_at_every_point(cut):
    """The text arrives in two pieces, as from a step that yields several tokens."""
    whole = ids_of("Hi\nUser: no")
    params = SamplingParams(stop=["\nUser:"])
    request = Request("r", [1], params, 0, 0, frozenset(), 99)
    text = TextStream(request, ByteTokenizer())
    for ids in (whole[:cut], whole[cut:]):
        request.output_token_ids += ids
        text.push(tuple(ids))
    assert (text.text, text.matched) == ("Hi", "\nUser:")


@pytest.mark.parametrize("size", range(1, 14))
@pytest.mark.parametrize("start", range(8))
def test_a_stop_string_at_every_place_of_a_step_leaks_nothing(start, size):
    """Steps of `size` tokens; the rest of the one that holds the stop string never shows."""
    ids = ids_of("x" * start + "END" + "y" * 9)
    params = SamplingParams(stop=["END"], logprobs=0)
    request = Request("r", [1], params, 0, 0, frozenset(), len(ids))
    text, pieces = TextStream(request, ByteTokenizer()), []
    for first in range(0, len(ids), size):
        new = ids[first : first + size]
        request.output_token_ids += new
        request.logprobs += [TokenLogprobs(i, -1.0, ()) for i in new]
        if first + size >= len(ids):
            request.finish_reason = "length"
        pieces.append(text.push(tuple(new)))
        if text.matched is not None:
            break
    assert ("".join(pieces), text.matched) == ("x" * start, "END")
    assert request.output_token_ids == ids[: start + 3]
    assert [entry.token_id for entry in request.logprobs] == ids[: start + 3]
    assert text.num_tokens == start + 3


def test_only_a_possible_stop_string_is_held_back():
    pieces, output = run(ids_of("a EN b END"), SamplingParams(stop=["END"]))
    assert pieces == ["a", " ", "", "", "EN ", "b", " ", "", "", ""]
    assert output.matched == "END"
    pieces, output = run(ids_of("a EN"), SamplingParams(stop=["END"]))
    assert pieces == ["a", " ", "", "EN"], "the end releases it"
    assert output.matched is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "ab"),
        ({"include_stop_str_in_output": True}, "ab"),  # a control token has no text
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "ab<end>"),
    ],
)
def test_a_stop_token_is_not_shown(fields, expected):
    _, output = run([97, 98, EOS], SamplingParams(**fields), "stop", EOS)
    assert output.text == expected


@pytest.mark.parametrize(("include", "expected"), [(False, "ab"), (True, "ab word")])
def test_a_stop_token_with_text(include, expected):
    params = SamplingParams(stop_token_ids=[NAMED], include_stop_str_in_output=include)
    _, output = run([97, 98, NAMED], params, "stop", NAMED)
    assert output.text == expected


def test_an_end_by_length_shows_its_last_token():
    _, output = run([97, NAMED], SamplingParams(), "length")
    assert output.text == "a word"


def test_control_tokens_inside_an_answer():
    ids = [97, EOS, 98]
    assert run(ids, SamplingParams(ignore_eos=True))[1].text == "ab"
    params = SamplingParams(ignore_eos=True, skip_special_tokens=False)
    assert run(ids, params)[1].text == "a<end>b"


def test_a_leading_space_belongs_to_the_answer():
    assert run([NAMED], SamplingParams())[1].text == " word"


@pytest.mark.parametrize("reason", ["length", "stop", "abort", "error"])
def test_a_character_cut_by_the_end_is_one_replacement(reason):
    ids = [*ids_of("a"), *"😀".encode()[:3]]
    if reason == "stop":
        ids.append(EOS)
    pieces, output = run(ids, SamplingParams(), reason)
    assert output.text == "a\ufffd"
    assert pieces[1:-1] == [""] * (len(ids) - 2), "nothing is shown while it may become whole"


def test_a_whole_character_is_shown_once():
    pieces, _ = run(list("é😀".encode()), SamplingParams())
    assert pieces == ["", "é", "", "", "", "😀"]


def test_held_text_and_a_cut_character_at_the_end():
    ids = [*ids_of("aEN"), 0xE2]
    _, output = run(ids, SamplingParams(stop=["END", "N\ufffd"]))
    assert (output.text, output.matched) == ("aE", "N\ufffd")
    _, output = run(ids, SamplingParams(stop=["END"]))
    assert (output.text, output.matched) == ("aEN\ufffd", None)


def test_a_match_that_waits_for_a_better_one_is_decided_by_the_end():
    _, output = run(ids_of("xab"), SamplingParams(stop=["abc", "ab"]))
    assert (output.text, output.matched) == ("x", "ab")


def test_an_end_without_a_new_token():
    """A step that failed brings no token, but what was held is still released."""
    params = SamplingParams(stop=["END"])
    request = Request("r", [1], params, 0, 0, frozenset(), 9)
    text = TextStream(request, ByteTokenizer())
    request.output_token_ids += ids_of("EN")
    assert text.push(tuple(ids_of("EN"))) == ""
    request.finish_reason = "error"
    assert text.push(()) == "EN"


@pytest.mark.parametrize(
    ("min_tokens", "text", "matched"),
    [(0, "a", "b"), (3, "abb", "b"), (4, "abbb", "b"), (5, "abbbbc", None), (9, "abbbbc", None)],
)
def test_stop_strings_count_after_min_tokens(min_tokens, text, matched):
    params = SamplingParams(stop=["b"], min_tokens=min_tokens)
    _, output = run(ids_of("abbbbc"), params)
    assert (output.text, output.matched) == (text, matched)


def test_without_text():
    pieces, output = run(ids_of("abc"), SamplingParams(detokenize=False))
    assert pieces == ["", "", ""]
    assert (output.text, output.matched) == ("", None)
