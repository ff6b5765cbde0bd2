"""Stop strings: the cut does not depend on how the text was streamed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.errors import ArgumentError
from tiercel.text.stop_strings import StopStrings


def run(stop, pieces, **options):
    """All text that was shown, and the match."""
    matcher = StopStrings(stop, **options)
    shown = "".join(matcher.push(piece)[0] for piece in pieces)
    last, matched = matcher.finish()
    assert matcher.matched == matched
    return shown + last, matched


def oracle(stop, text, *, include_stop_str=False):
    """The rule on a whole text: first to begin, then first in the list."""
    found = [(text.find(s), rank) for rank, s in enumerate(stop) if s in text]
    if not found:
        return text, None
    start, rank = min(found)
    return text[: start + len(stop[rank]) * include_stop_str], stop[rank]


@settings(max_examples=400, deadline=None)
@given(
    stop=st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("ab\u00e9", max_size=4), max_size=8),
    include=st.booleans(),
)
def test_any_split_equals_the_whole(stop, pieces, include):
    text = "".join(pieces)
    expected = oracle(stop, text, include_stop_str=include)
    assert run(stop, pieces, include_stop_str=include) == expected
    assert run(stop, text, include_stop_str=include) == expected


@settings(max_examples=200, deadline=None)
@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    text=st.text("abc", max_size=12),
)
def test_held_text_is_the_shortest_that_is_safe(stop, text):
    matcher = StopStrings(stop)
    shown = ""
    for end, char in enumerate(text, 1):
        piece, matched = matcher.push(char)
        shown += piece
        if matched or any(s in text[:end] for s in stop):
            break
        held = text[len(shown) : end]
        longest = max(
            (n for s in stop for n in range(len(s)) if text[:end].endswith(s[:n])), default=0
        )
        assert len(held) == longest


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (["aab"], "aaab", ("a", "aab")),  # overlaps itself
        (["STOP"], "STOP", ("", "STOP")),  # is the whole answer
        (["ab", "abc"], "xabcd", ("x", "ab")),
        (["abc", "ab"], "xabcd", ("x", "abc")),  # of equals the first in the list
        (["abc", "ab"], "xab", ("x", "ab")),
        (["bc", "abcd"], "abcd", ("", "abcd")),  # begins first
        (["bc", "abcd"], "abce", ("a", "bc")),
        (["。終"], "日本。終わり", ("日本", "。終")),
        (["</s>"], "a </ s> </", ("a </ s> </", None)),
        ([], "abc", ("abc", None)),
    ],
)
def test_cases(stop, text, expected):
    for size in (1, 2, 3, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert run(stop, pieces) == expected


def test_pieces_of_one_match():
    matcher = StopStrings(["\nUser:"])
    assert matcher.push("Hello\nUs") == ("Hello", None)
    assert matcher.push("e") == ("", None)
    assert matcher.push("d\nUser: x") == ("\nUsed", "\nUser:")
    assert matcher.push("more") == ("", "\nUser:")
    assert matcher.finish() == ("", "\nUser:")


def test_include_stop_string():
    assert run(["END"], ["aE", "ND", "b"], include_stop_str=True) == ("aEND", "END")


def test_empty_stop_string_is_refused():
    with pytest.raises(ArgumentError, match="empty"):
        StopStrings(["a", ""])
