"""Streaming detokenizer: any split of any ids gives the text of all ids together."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.test_tokenizer import load, make_bpe, make_spm
from tiercel.errors import ArgumentError
from tiercel.text.detokenize import Detokenizer

TEXTS = (
    "👨‍👩‍👧‍👦 family, 🇫🇷 flag, e\u0301 and क्षि",
    "مرحبا \u202b שלום\u202c",
    "中文、ありがとう、한국어, Привет",
    "\x00\x01\n\r\n\u2028\uffff\U0010ffff",
)
BPE, SPM = make_bpe(), make_spm()


def stream(tokenizer, pieces, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(ids) for ids in pieces), detokenizer.finish()]


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("is_continuation", [True, False])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_split_of_random_ids_joins_to_decode(tokenizer, skip, is_continuation, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    options = {"skip_special_tokens": skip, "is_continuation": is_continuation}
    whole = tokenizer.decode(ids, **options)
    assert "".join(stream(tokenizer, [[i] for i in ids], **options)) == whole
    for cut in range(len(ids) + 1):
        assert "".join(stream(tokenizer, [ids[:cut], ids[cut:]], **options)) == whole


@settings(max_examples=40, deadline=None)
@given(ids=st.lists(st.integers(6, 261), max_size=12))
def test_random_bytes(ids):
    """Byte tokens only: overlong forms, surrogates and cut characters are all likely."""
    raw = bytes(i - 6 for i in ids)
    joined = "".join(stream(SPM, [[i] for i in ids]))
    assert joined == raw.decode("utf-8", "replace")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
def test_no_piece_holds_part_of_a_character(tokenizer, text):
    pieces = stream(tokenizer, [[i] for i in tokenizer.encode(text)], is_continuation=False)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_default_model_languages(default_model):
    tokenizer = load(default_model)
    for text in TEXTS[:3]:
        ids = tokenizer.encode(text)
        assert "".join(stream(tokenizer, [[i] for i in ids])) == text


def test_cut_character_becomes_one_mark_at_the_end():
    ids = [6 + byte for byte in "😀".encode()[:3]]
    assert stream(SPM, [[i] for i in ids]) == ["", "", "", "\ufffd"]


def test_bytes_that_can_never_complete_are_marked_at_once():
    e0, x80 = 6 + 0xE0, 6 + 0x80
    assert stream(SPM, [[e0], [x80], [6 + 0x41]]) == ["", "\ufffd\ufffd", "A", ""]


def test_leading_space_of_a_continuation_is_kept():
    ids = SPM.encode("the")
    assert stream(SPM, [ids]) == [" the", ""]
    assert stream(SPM, [ids], is_continuation=False) == ["the", ""]
    # Only the first space of the text is removed, also after a hidden first token.
    twice = [SPM.control_tokens["<s>"], *ids, *ids]
    assert stream(SPM, [[i] for i in twice], is_continuation=False)[1:] == ["the", " the", ""]


def test_special_tokens():
    end = BPE.control_tokens["<|im_end|>"]
    assert stream(BPE, [[end]]) == ["", ""]
    assert stream(BPE, [[end]], skip_special_tokens=False) == ["<|im_end|>", ""]


def test_finish_twice_and_wrong_ids():
    detokenizer = Detokenizer(BPE)
    with pytest.raises(ArgumentError, match="out of range"):
        detokenizer.push([0, BPE.vocab_size])
    assert detokenizer.push([]) == ""
    assert (detokenizer.finish(), detokenizer.finish()) == ("", "")
