"""The bounds of vocabularies and texts: a value at the bound is accepted, one beyond refused."""

import pytest

from tests.text.test_tokenizer import KEY, bpe_metadata, make_bpe, make_spm, spm_metadata
from tiercel.errors import InvalidRequestError, ModelFormatError
from tiercel.text import tokenizer_build, tokenizer_data
from tiercel.text.tokenizer import Tokenizer, check_text
from tiercel.text.tokenizer_data import BYTE, CONTROL, NORMAL, UNUSED, TokenizerData

pytestmark = pytest.mark.reliability


def read(tokens, **changes):
    """The fields of a byte-level vocabulary of these tokens."""
    metadata = {KEY + "model": "gpt2", KEY + "tokens": tokens, KEY + "merges": []}
    metadata |= {KEY + key: value for key, value in changes.items()}
    return TokenizerData.from_gguf(metadata, "x.gguf")


def is_refused(function, *arguments, words, **options):
    try:
        function(*arguments, **options)
    except (ModelFormatError, InvalidRequestError) as error:
        text = str(error)
    else:
        return False
    assert words in text
    return True


def test_characters_of_a_text():
    """No more than the regex engine can process, and Unicode up to its last character."""
    check_text("x" * 8_388_608)
    assert is_refused(check_text, "x" * 8_388_609, words="the limit is 8388608")
    for text in ("\ud7ff", "\ue000", "\U0010ffff", "\0", ""):
        check_text(text)
    for text in ("\ud800", "\udbff", "\udc00", "\udfff"):
        assert is_refused(check_text, f"é{text}", words=f"U+{ord(text):04X} at character 1")


def test_characters_of_a_token():
    assert len(read(["a", "b" * 1024]).tokens[1]) == 1024
    assert is_refused(read, ["a", "b" * 1025], words="tokens[1] has 1025 characters")


@pytest.mark.parametrize(
    ("name", "inside", "beyond", "words"),
    [
        ("MAX_TOKENS", ["a", "b", "c"], ["a", "b", "c", "d"], "it must hold 1 to 3"),
        ("MAX_TOTAL_CHARS", ["ab", "c"], ["ab", "cd"], "holds 4 characters; the limit is 3"),
    ],
)
def test_size_of_a_vocabulary(name, inside, beyond, words, monkeypatch):
    monkeypatch.setattr(tokenizer_data, name, 3)
    assert read(inside).tokens == tuple(inside)
    assert is_refused(read, beyond, words=words)
    assert is_refused(read, [], words="holds 0 tokens")


def test_the_largest_sizes():
    found = {
        name: getattr(tokenizer_data, name)
        for name in ("MAX_TOKENS", "MAX_TOKEN_CHARS", "MAX_TOTAL_CHARS", "MAX_MERGES")
    }
    assert found == {
        "MAX_TOKENS": 4_194_304,
        "MAX_TOKEN_CHARS": 1024,
        "MAX_TOTAL_CHARS": 16_777_216,
        "MAX_MERGES": 4_194_304,
    }


def test_number_of_merges(monkeypatch):
    monkeypatch.setattr(tokenizer_data, "MAX_MERGES", 2)
    tokens = ["a", "b", "ab", "ba", "aa"]
    assert len(read(tokens, merges=["a b", "b a"]).merges) == 2
    assert is_refused(read, tokens, merges=["a b", "b a", "a a"], words="holds 3 merges")


def test_number_of_derived_merges(monkeypatch):
    """Of "ab", "abc" and "bc": a+b, b+c, and the two ways to "abc"."""
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    metadata = {
        KEY + "model": "llama",
        KEY + "tokens": tokens,
        KEY + "scores": [float(i) for i in range(6)],
    }
    data = TokenizerData.from_gguf(metadata, "x.gguf")
    monkeypatch.setattr(tokenizer_build, "MAX_MERGES", 4)
    assert Tokenizer.from_gguf(data).encode("abc")
    monkeypatch.setattr(tokenizer_build, "MAX_MERGES", 3)
    assert is_refused(Tokenizer.from_gguf, data, words="more than 3 merges")


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "eot_token_id",
                                 "unknown_token_id", "padding_token_id"])  # fmt: skip
def test_ids_end_with_the_vocabulary(key):
    tokens = ["a", "b", "c"]
    for token_id in (0, 2):
        data = read(tokens, **{key: token_id})
        names = ("bos_id", "eos_id", "eot_id", "unk_id", "pad_id")
        found = {name: getattr(data, name) for name in names}
        assert [value for value in found.values() if value is not None] == [token_id]
        assert found[{"unknown_token_id": "unk_id", "padding_token_id": "pad_id"}.get(
            key, f"{key[:3]}_id")] == token_id  # fmt: skip
    for token_id in (-1, 3):
        assert is_refused(read, tokens, **{key: token_id}, words=f"{key} is {token_id}")


def test_kinds_of_tokens():
    """0 to 6: 0, a token without a type, is ordinary text, as in llama.cpp."""
    tokens = ["<0x00>", "a", "<0x41>", "<b>", "<u>"]
    data = read(tokens, token_type=[BYTE, 0, BYTE, CONTROL, UNUSED])
    assert data.token_types == (BYTE, NORMAL, BYTE, CONTROL, UNUSED)
    tokenizer = Tokenizer.from_gguf(data)
    assert tokenizer.decode([0, 1, 2, 3, 4]) == "\0aA"
    assert [tokenizer.is_special(i) for i in range(5)] == [False, False, False, True, True]
    for kind in (-1, 7):
        assert is_refused(read, tokens, token_type=[BYTE, kind, BYTE, 1, 1], words=f"is {kind};")


@pytest.mark.parametrize("make", [make_bpe, make_spm])
def test_ids_of_a_tokenizer_end_with_its_vocabulary(make):
    tokenizer = make()
    last = tokenizer.vocab_size - 1
    tokenizer.decode([0, last])
    for token_id in (-1, last + 1):
        for method in (tokenizer.token_bytes, tokenizer.token_text, tokenizer.is_special):
            with pytest.raises(ValueError, match=f"Use 0 to {last}|out of range"):
                method(token_id)


def test_lengths_of_parallel_lists():
    for make, metadata, keys in (
        (make_bpe, bpe_metadata(), ["token_type"]),
        (make_spm, spm_metadata(), ["token_type", "scores"]),
    ):
        for key in keys:
            values = metadata[KEY + key]
            for changed in (values[:-1], [*values, values[-1]]):
                assert is_refused(make, **{key: changed}, words=f"has {len(changed)} entries")
