"""Thinking told from the answer, whatever the pieces; where it begins is the prompt's to say."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.test_tokenizer import make_bpe
from tiercel.errors import ArgumentError
from tiercel.grammar.spec import ThinkingForm
from tiercel.models.source import open_source
from tiercel.serve.generation.output_events import ContentDelta, ReasoningDelta
from tiercel.serve.generation.reasoning_parser import (
    FORMATS,
    ThinkTagParser,
    prompt_tail,
    select_reasoning_format,
)

OPEN = ThinkingForm("<think>", "</think>", is_open=True)
CLOSED = ThinkingForm("<think>", "</think>", is_open=False)


def read(form, pieces):
    """(thinking, answer) of a text that comes in these pieces."""
    splitter = ThinkTagParser(form)
    events = [event for piece in pieces for event in splitter.push(piece)] + splitter.finish()
    assert all(event.text for event in events)
    kinds = [type(event) for event in events]
    assert kinds == sorted(kinds, key=[ReasoningDelta, ContentDelta].index)
    return tuple(
        "".join(event.text for event in events if isinstance(event, kind))
        for kind in (ReasoningDelta, ContentDelta)
    )


CASES = [
    (OPEN, "hm\n</think>\n\nFour.", ("hm", "Four.")),
    (OPEN, "hm</think>Four.", ("hm", "Four.")),
    (OPEN, "\n\na\n\nb\n\n</think>\n\n\n c\n", ("a\n\nb", " c\n")),
    (OPEN, "</think>\n\nFour.", ("", "Four.")),
    (OPEN, "\n  hm \n</think>\n\n  x ", ("  hm ", "  x ")),  # line ends alone are markup
    (OPEN, "never ends\n", ("never ends\n", "")),
    (OPEN, "never ends </thin", ("never ends </thin", "")),
    (OPEN, "<think> a <think></think>b</think>c", ("<think> a <think>", "b</think>c")),
    (OPEN, "", ("", "")),
    (CLOSED, "<think>\nhm\n</think>\n\nFour.", ("hm", "Four.")),
    (CLOSED, "\n<think>hm</think>Four.", ("hm", "Four.")),
    (CLOSED, "Four.", ("", "Four.")),
    (CLOSED, "\n\nFour. <think>x</think>", ("", "\n\nFour. <think>x</think>")),
    (CLOSED, "<thin", ("", "<thin")),
    (CLOSED, "<thinking>", ("", "<thinking>")),
    (CLOSED, "<think>", ("", "")),
    (CLOSED, " \n", ("", " \n")),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_split(form, text, expected):
    assert read(form, [text]) == expected
    assert read(form, text) == expected
    for cut in range(len(text)):
        assert read(form, [text[:cut], text[cut:]]) == expected


@settings(max_examples=200, deadline=None)
@given(
    scraps=st.lists(
        st.sampled_from(["<think>", "</think>", "\n", " ", "a", "<", "/", "think>", "é"])
    ),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    is_open=st.booleans(),
)
def test_any_text_gives_the_same_in_any_pieces(scraps, cuts, is_open):
    text, form = "".join(scraps), OPEN if is_open else CLOSED
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = read(form, [text])
    assert read(form, [text[start:stop] for start, stop in pairwise(places)]) == whole
    assert read(form, text) == whole
    if "think>" not in text:
        assert "".join(whole).strip("\n") == text.strip("\n")  # nothing is lost


def test_thinking_comes_as_it_is_written():
    splitter = ThinkTagParser(OPEN)
    assert splitter.push("\nI see") == [ReasoningDelta("I see")]
    assert splitter.is_inside
    assert splitter.push(" it.\n</thi") == [ReasoningDelta(" it.")]
    assert splitter.push("nk>\n") == []
    assert not splitter.is_inside
    assert splitter.push("\nYes") == [ContentDelta("Yes")]
    assert splitter.push("</think>") == [ContentDelta("</think>")]
    assert splitter.finish() == []


def test_before_it_is_known_nothing_is_shown():
    splitter = ThinkTagParser(CLOSED)
    assert not splitter.is_inside
    assert splitter.push("\n<thin") == []
    assert splitter.push("k>a") == [ReasoningDelta("a")]
    assert splitter.is_inside


@pytest.mark.parametrize(
    ("tail", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None),
        ("", False),
    ],
)
def test_the_prompt_says_where_the_answer_begins(tail, is_open):
    form = FORMATS["think"].form(tail)
    assert form == (
        None if is_open is None else ThinkingForm("<think>", "</think>", is_open=is_open)
    )


def test_the_tail_of_a_prompt_shows_control_tokens():
    tokenizer = make_bpe()
    ids = tokenizer.encode("hello <|im_start|>assistant\n<think>\n", parse_special=True)
    tail = prompt_tail(tokenizer, ids)
    assert tail.endswith("<think>\n")
    assert FORMATS["think"].form(tail).is_open


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>' }}{{ '</think>' }}", "think"),
        ("{{ content.split('</think>')[-1] }}", "think"),
        ("[THINK][/THINK]", "mistral"),
        ("<|channel>thought\n<channel|>", "gemma4"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_template_names_the_format(template, name):
    found = select_reasoning_format(template, None)
    assert (found and found.name) == name


def test_formats_by_name(default_model):
    for name in FORMATS:
        assert select_reasoning_format(None, name).name == name
        assert select_reasoning_format("</think>", "none") is None
    with pytest.raises(ArgumentError, match="reasoning_parser='nope'"):
        select_reasoning_format("</think>", "nope")
    template = open_source(default_model).tokenizer(None).chat_template
    assert select_reasoning_format(template, None) is None


def test_needs_special():
    assert FORMATS["think"].needs_special({"</think>": 7})
    assert not FORMATS["think"].needs_special({"<|im_end|>": 7, "": 8})
