"""Framing of events: nothing that an answer holds can break it (reliability case B5)."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.events import read_events
from tiercel.serve.http.sse import encode_event

HOSTILE = [
    "\r\n",
    "\n\n",
    "\r",
    "data: x\n\ndata: [DONE]\n\n",
    "event: error\ndata: {}\n\n",
    ": comment",
    "a\u2028b\u2029c\u0085d\x0b\x0c\x1c\x1d\x1e",
    "\x00\x01\x7f",
    "\ufeff",
    "\uffff\U0010ffff",
    '"\\"',
    "[DONE]",
]


@pytest.mark.parametrize("text", HOSTILE, ids=repr)
def test_hostile_text_stays_in_its_event(text):
    data = encode_event({"text": text}, "delta") + encode_event({"text": "next"})
    assert read_events(data) == [("delta", {"text": text}), ("", {"text": "next"})]


@given(st.text(), st.dictionaries(st.text(), st.text()))
def test_every_way_to_split_lines_finds_one_data_line(text, more):
    """Some clients split as `str.splitlines` does, which knows eleven line breaks."""
    value = {"text": text, "more": more}
    data = encode_event(value)
    lines = data.decode().splitlines()
    assert len(lines) == 2
    assert lines[1] == ""
    assert json.loads(lines[0].removeprefix("data: ")) == value


def test_the_name_comes_first():
    assert encode_event([1], "x.y") == b"event: x.y\ndata: [1]\n\n"


@pytest.mark.parametrize("text", list("\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), ids=ascii)
def test_no_line_break_of_unicode_is_sent_as_it_is(text):
    data = encode_event({"text": f"a{text}b"}, "delta").decode()
    assert data.splitlines()[:1] == ["event: delta"]
    assert data.splitlines()[2:] == [""]
    assert json.loads(data.splitlines()[1].removeprefix("data: ")) == {"text": f"a{text}b"}
    assert data.endswith("\n\n")
