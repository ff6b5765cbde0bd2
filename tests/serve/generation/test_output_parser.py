"""Tokens to text, reasoning and calls: what is held back, where it stops, what is counted."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.fake_client import fake_info, fake_tokenizer
from tiercel.params import SamplingParams
from tiercel.request.inputs import InputProcessor
from tiercel.request.text_stream import TextStream
from tiercel.serve.api.assembled_message import assemble_message, merge_events
from tiercel.serve.generation.output_events import ContentDelta, ReasoningDelta
from tiercel.serve.generation.output_parser import OutputParser, Parsers

TOKENIZER = fake_tokenizer()
EOS = TOKENIZER.eos_id


class Marked:
    """Thinking in angle brackets: ``<...>`` and then the answer."""

    def __init__(self):
        self.is_inside = False
        self._is_done = False

    def push(self, text):
        events = []
        for char in text:
            if char == "<" and not self._is_done:
                self.is_inside = True
            elif char == ">" and self.is_inside:
                self.is_inside, self._is_done = False, True
            else:
                events.append(ReasoningDelta(char) if self.is_inside else ContentDelta(char))
        return events

    def finish(self):
        return []


def answer(params=None, parsers=None):
    info = fake_info()
    inputs = InputProcessor(
        TOKENIZER, vocab_size=info.vocab_size, max_position=512, max_model_len=256, seed=0
    )
    request = inputs.request([1], params or SamplingParams(max_tokens=None), 0)
    return request, OutputParser(request, TOKENIZER, parsers or Parsers())


def feed(text, ids, *, reason="stop"):
    """Push ids one by one, the last of which ends the answer; returns what was said."""
    events = []
    for place, token_id in enumerate(ids):
        events += text.push(token_id, is_stopped=reason == "stop" and place == len(ids) - 1)
        if text.matched is not None:
            break
    return assemble_message(merge_events([*events, *text.finish()]))


B3 = [
    ("aaab", ["aab"], "a", "aab"),
    ("aaab", ["aaab"], "", "aaab"),
    ("one two three", ["two three", "two"], "one ", "two three"),
    ("one two thrice", ["two three", "two"], "one ", "two"),
    ("ababac", ["abac"], "ab", "abac"),
    ("日本語です", ["語で"], "日本", "語で"),
    ("a😀b", ["😀"], "a", "😀"),
    ("abc", ["x"], "abc", None),
    ("abc", ["cd"], "abc", None),
    ("x\n\ny", ["\n\n"], "x", "\n\n"),
]


@pytest.mark.parametrize(("whole", "stop", "shown", "matched"), B3, ids=repr)
def test_stop_strings(whole, stop, shown, matched):
    ids = TOKENIZER.encode(whole)
    _, text = answer(SamplingParams(stop=stop, max_tokens=None))
    assert feed(text, [*ids, EOS]).content == shown
    assert text.matched == matched
    _, text = answer(SamplingParams(stop=stop, max_tokens=None, include_stop_str_in_output=True))
    # An end token is shown too then, but it has no visible text.
    assert feed(text, [*ids, EOS]).content == shown + (matched or "")


def test_tokens_behind_a_stop_string_are_not_counted():
    _, text = answer(SamplingParams(stop=["b"], max_tokens=None))
    feed(text, TOKENIZER.encode("aabaa"), reason="length")
    assert text.num_tokens == 3


def test_no_stop_before_min_tokens():
    _, text = answer(SamplingParams(stop=["a"], min_tokens=3, max_tokens=None))
    assert feed(text, TOKENIZER.encode("aaxaax"), reason="length").content == "aax"


@pytest.mark.parametrize("includes", [False, True])
@pytest.mark.parametrize("min_tokens", range(7))
def test_stop_strings_are_looked_for_behind_min_tokens(min_tokens, includes):
    """As vLLM does: within the text of the tokens after those. All answers of six letters."""
    ids = {letter: TOKENIZER.encode(letter) for letter in "ab"}
    assert all(len(found) == 1 for found in ids.values())
    for letters in itertools.product("ab", repeat=6):
        params = SamplingParams(stop=["ab", "b"], min_tokens=min_tokens, max_tokens=None,
                                include_stop_str_in_output=includes)  # fmt: skip
        _, text = answer(params)
        found = feed(text, [i for letter in letters for i in ids[letter]], reason="length")
        whole = "".join(letters)
        first, rest = whole[:min_tokens], whole[min_tokens:]
        places = [(rest.find(stop), rank) for rank, stop in enumerate(["ab", "b"]) if stop in rest]
        matched = ["ab", "b"][min(places)[1]] if places else None
        shown = rest if matched is None else rest[: min(places)[0]] + matched * includes
        assert (found.content, text.matched) == (first + shown, matched)
        used = min(places)[0] + len(matched) if matched else len(rest)
        assert text.num_tokens == len(first) + used


@pytest.mark.parametrize("includes", [False, True])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_end_token_that_was_asked_for_is_shown_where_stops_are(includes, reason):
    params = SamplingParams(stop_token_ids=[120], include_stop_str_in_output=includes,
                            max_tokens=None)  # fmt: skip
    _, text = answer(params)
    ids = [*TOKENIZER.encode("xa"), 120]
    shown = "xax" if includes or reason == "length" else "xa"
    assert feed(text, ids, reason=reason).content == shown
    assert text.num_tokens == 3


def test_a_character_cut_by_the_end_is_shown_once():
    for cut in (1, 2, 3):
        _, text = answer()
        ids = TOKENIZER.encode("x😀")[: 1 + cut]
        assert feed(text, ids, reason="length").content == "x\N{REPLACEMENT CHARACTER}"


def test_an_end_token_is_hidden_and_counted():
    _, text = answer(SamplingParams(stop_token_ids=[120], max_tokens=None))
    assert feed(text, [*TOKENIZER.encode("ax"), 120]).content == "ax"
    assert text.num_tokens == 3


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30), st.booleans())
@settings(max_examples=200)
def test_the_same_text_as_without_a_server(ids, is_stopped):
    """`TextStream` is what the Python API uses."""
    params = SamplingParams(stop=["ab", "\N{REPLACEMENT CHARACTER}a"], max_tokens=None)
    request, text = answer(params)
    ids = [*(i for i in ids if i not in request.stop_ids), *([EOS] if is_stopped else [])]
    reference = TextStream(request, TOKENIZER)
    events = []
    for place, token_id in enumerate(ids):
        is_last = place == len(ids) - 1
        request.output_token_ids.append(token_id)
        request.finish_reason = ("stop" if is_stopped else "length") if is_last else None
        reference.push((token_id,))
        events += text.push(token_id, is_stopped=is_stopped and is_last)
        if reference.matched is not None:
            break
    if ids:
        events += text.finish()
    assert assemble_message(events).content == reference.text
    assert text.matched == reference.matched


def test_reasoning_is_split_and_counted():
    _, text = answer(parsers=Parsers(reasoning=Marked()))
    result = feed(text, [*TOKENIZER.encode("<why>yes"), EOS])
    assert (result.reasoning, result.content) == ("why", "yes")
    assert text.num_reasoning_tokens == len(TOKENIZER.encode("<why>"))


@pytest.mark.parametrize("in_reasoning", [False, True])
def test_stop_strings_and_reasoning(in_reasoning):
    parsers = Parsers(reasoning=Marked(), stops_in_reasoning=in_reasoning)
    _, text = answer(SamplingParams(stop=["b"], max_tokens=None), parsers)
    result = feed(text, [*TOKENIZER.encode("<abc>abc"), EOS])
    expected = ("a", "") if in_reasoning else ("abc", "a")
    assert (result.reasoning, result.content) == expected


def test_reasoning_that_the_length_cuts_has_no_content():
    _, text = answer(parsers=Parsers(reasoning=Marked()))
    result = feed(text, TOKENIZER.encode("<never ends"), reason="length")
    assert (result.reasoning, result.content) == ("never ends", "")


def test_control_tokens_show_only_where_a_parser_reads_them():
    ids = [97, TOKENIZER.control_tokens["<|im_start|>"], 98]
    _, text = answer()
    assert feed(text, ids, reason="length").content == "ab"
    _, text = answer(parsers=Parsers(needs_special=True))
    assert feed(text, ids, reason="length").content == "a<|im_start|>b"
