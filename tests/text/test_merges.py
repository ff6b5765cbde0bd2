"""Byte-pair merges in the order of their rank, and the pieces of text that bound them.

The oracles are the paper's loop over one piece and the published patterns in Python's `regex`.
"""

import hashlib
import random
import struct
from itertools import pairwise

import pytest
import regex

from tests.gguf_files import byte_characters
from tests.text.test_tokenizer import KEY, make_bpe, spm_metadata
from tiercel.text.tokenizer import Tokenizer
from tiercel.text.tokenizer_build import SPLITS, build_encoders
from tiercel.text.tokenizer_data import TokenizerData

# openai/gpt-2, src/encoder.py.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The files tokenizer.json of Qwen2.5 and of Llama 3: single digits, or up to three.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# DeepSeek-V3's: three patterns, each applied to the pieces that the previous one left whole.
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
PUBLISHED = {
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "qwen2": (QWEN2,),
    "llama-bpe": (LLAMA3,),
    "deepseek-v3": DEEPSEEK,
}
SCRAPS = [
    *("'s", "'S", "'ll", "'LL", "'re", "'x", "'"), *("a", "Bc", "don", "é", "e\u0301", "你", "好"),
    *("かな", "カナ", "한", "1", "23", "456", "7890", "½", "٣"), *(" ", "  ", "\n", "\r\n", "\t"),
    *("\u00a0", "\u3000", "!", "?!", "...", "(", ")", "_", "-", "/", "<|", "|>", "$", "€", "😀"),
    *("\u4e00", "\u9fa5", "\u9fa6", "\u3040", "\u30ff", "\u3100", "#if", "\\n", "`x`", "@y"),
]  # fmt: skip


def published_pieces(name, text):
    pieces = [text]
    for pattern in PUBLISHED[name]:
        cut = []
        for piece in pieces:
            position = 0
            for found in regex.finditer(pattern, piece):
                cut += [piece[position : found.start()], found[0]]
                position = found.end()
            cut.append(piece[position:])
        pieces = [piece for piece in cut if piece]
    return pieces


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_text_is_cut_as_the_published_patterns_say(name):
    rng = random.Random(name)
    metadata = {KEY + "model": "gpt2", KEY + "pre": name, KEY + "merges": []}
    data = TokenizerData.from_gguf(metadata | {KEY + "tokens": byte_characters()}, "x.gguf")
    splitter = build_encoders(data, None, "").plain.pre_tokenizer
    for _ in range(400):
        text = "".join(rng.choices(SCRAPS, k=rng.randint(1, 12)))
        found = [text[start:stop] for _, (start, stop) in splitter.pre_tokenize_str(text)]
        assert found == published_pieces(name, text), text


def random_vocabulary(rng):
    """Tokens over three letters and merges that make them, ranks and ids in unrelated orders."""
    tokens = ["a", "b", "c"]
    merges = {}
    for _ in range(rng.randint(3, 25)):
        left, right = rng.choices(tokens, k=2)
        if len(left + right) <= 8:
            merges[left, right] = None  # two ways to one token are two merges
            if left + right not in tokens:
                tokens.append(left + right)
    ranked = list(merges)
    rng.shuffle(ranked)
    rng.shuffle(tokens)
    return tokens, ranked


def merged(ranked, piece):
    """The paper's loop: of all neighbours the pair of lowest rank is joined, leftmost first."""
    ranks = {pair: rank for rank, pair in enumerate(ranked)}
    parts = list(piece)
    while True:
        found = [
            (ranks[pair], place) for place, pair in enumerate(pairwise(parts)) if pair in ranks
        ]
        if not found:
            return parts
        place = min(found)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@pytest.mark.parametrize("seed", range(60))
def test_merges_are_applied_by_rank(seed):
    rng = random.Random(seed)
    tokens, ranked = random_vocabulary(rng)
    metadata = {
        KEY + "model": "gpt2",
        KEY + "pre": "qwen2",
        KEY + "tokens": tokens,
        KEY + "merges": [f"{left} {right}" for left, right in ranked],
    }
    tokenizer = Tokenizer.from_gguf(TokenizerData.from_gguf(metadata, "x.gguf"))
    for _ in range(15):
        text = "".join(rng.choices("abc", k=rng.randint(1, 24)))
        ids = tokenizer.encode(text)
        assert [tokens[i] for i in ids] == merged(ranked, text)
        assert tokenizer.decode(ids) == text


def test_a_whole_piece_is_looked_up_first_by_llama_bpe_alone():
    """Llama 3 uses a piece that is a token as is; other vocabularies merge it from its bytes."""
    merges = ["l l", "h e"]
    for name in SPLITS:
        tokenizer = make_bpe(pre=name, merges=merges)
        is_whole = len(tokenizer.encode("hello")) == 1
        assert is_whole == (name == "llama-bpe"), name


def test_a_merge_may_begin_with_a_space():
    """The separator is the first space after the first character."""
    metadata = {
        KEY + "model": "gpt2",
        KEY + "tokens": [" ", "a", " a", "a ", "b", "a b"],
        KEY + "merges": ["  a", "a  ", "a  b"],
    }
    with pytest.raises(Exception, match=r"merges\[2\] is 'a  b', and ' b' is not a token"):
        TokenizerData.from_gguf(metadata, "x.gguf")
    metadata[KEY + "merges"].pop()
    data = TokenizerData.from_gguf(metadata, "x.gguf")
    assert data.merges == ((" ", "a"), ("a", " "))


def test_merges_are_kept_only_where_a_folder_and_a_key_are_given(tmp_path):
    data = TokenizerData.from_gguf(spm_metadata(), "x.gguf")
    for folder, key in ((None, "key"), (tmp_path, ""), (None, "")):
        Tokenizer.from_gguf(data, cache_dir=folder, cache_key=key)
        assert list(tmp_path.iterdir()) == []
    for key in ("one", "two", "one"):
        Tokenizer.from_gguf(data, cache_dir=tmp_path, cache_key=key)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("ids", [(282, 0), (0, 282), (281, 281, 2**32 - 1, 0), (5,)])
def test_kept_merges_name_tokens_of_the_vocabulary(ids, tmp_path):
    """An entry with a right hash and wrong ids is rebuilt, like a damaged one."""
    data = TokenizerData.from_gguf(spm_metadata(), "x.gguf")
    assert len(data.tokens) == 282
    expected = Tokenizer.from_gguf(data, cache_dir=tmp_path, cache_key="k").encode("the hello")
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    body = whole[40:72] + struct.pack(f"<{len(ids)}I", *ids)
    entry.write_bytes(whole[:8] + hashlib.sha256(body).digest() + body)
    again = Tokenizer.from_gguf(data, cache_dir=tmp_path, cache_key="k")
    assert again.encode("the hello") == expected
    assert entry.read_bytes() == whole
