"""Hugging Face tokenizer files: equal to the library that wrote them, hostile files refused."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from tiercel.errors import ModelFormatError, UnsupportedModelError
from tiercel.text import tokenizer_json
from tiercel.text.chat_template import ChatTemplate, encode_chat
from tiercel.text.template_client import TemplateWorker
from tiercel.text.tokenizer import Tokenizer

TEXTS = ("hello", " hello  hello", "naïve 你好 😀", "a<|end|>b<think>c", "<s>hello", "")


def byte_level():
    """A file as many models have it; special and other added tokens beyond the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate([*alphabet, "he", "ll", "hell", "hello", "Ġhello"])}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello")]
    whole = tokenizers.Tokenizer(models.BPE(vocab, merges))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens(["<s>", "<|end|>"])
    whole.add_tokens(["<think>"])
    whole.add_special_tokens(["<|im_end|>"])
    bos = whole.token_to_id("<s>")
    whole.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    return whole


def sentencepiece_style():
    """Metaspace with "first", byte fallback, a prefix that decoding removes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    tokens += ["▁", "h", "e", "l", "o", "▁h", "el", "▁hel", "▁hell"]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = [("▁", "h"), ("e", "l"), ("▁h", "el"), ("▁hel", "l")]
    whole = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    whole.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    whole.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    whole.add_special_tokens(["<s>", "</s>"])
    return whole


def write(folder, content):
    path = folder / "tokenizer.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def read(folder, content, *configs, **options):
    return Tokenizer.from_file(write(folder, content), *configs, **options)


@pytest.mark.parametrize("make", [byte_level, sentencepiece_style])
def test_equal_to_the_library(make, tmp_path):
    peer = make()
    tokenizer = read(tmp_path, peer.to_str())
    for text in TEXTS:
        ids = peer.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, parse_special=True) == ids
        assert tokenizer.decode(ids) == peer.decode(ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == peer.decode(
            ids, skip_special_tokens=False
        )


def test_modes_and_roles(tmp_path):
    config = {"eos_token": {"content": "<|end|>"}, "chat_template": "{{ messages }}"}
    generation = {"eos_token_id": [256, 257]}
    tokenizer = read(tmp_path, byte_level().to_str(), config, generation, vocab_size=300)
    end = tokenizer.control_tokens["<|end|>"]
    assert end not in tokenizer.encode("<|end|>")
    assert len(tokenizer.encode("<think>")) == 1
    assert tokenizer.eos_id == end
    assert tokenizer.stop_ids == (256, 257, end, tokenizer.control_tokens["<|im_end|>"])
    assert tokenizer.add_bos
    assert tokenizer.encode("hello", add_special_tokens=True)[0] == tokenizer.bos_id
    assert tokenizer.token_text(tokenizer.bos_id) == "<s>"
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.unused_ids == tuple(range(265, 300))
    assert tokenizer.decode(tokenizer.unused_ids) == ""
    assert not read(tmp_path, byte_level().to_str(), {"add_bos_token": False}).add_bos


def test_first_word_mark_belongs_to_the_input_not_to_each_piece(tmp_path):
    tokenizer = read(tmp_path, sentencepiece_style().to_str())
    whole = tokenizer.encode("hell</s>hell", parse_special=True)
    pieces = [*tokenizer.encode("hell"), 2, *tokenizer.encode_inner("hell")]
    assert whole == pieces


def changed(**changes):
    return json.loads(byte_level().to_str()) | changes


def changed_model(**changes):
    content = json.loads(byte_level().to_str())
    content["model"] |= changes
    return content


HOSTILE = {
    "no JSON": ("{", "is not JSON"),
    "an array": ([], "the file is a list; it must be an object"),
    "nested": ("[" * 100_000, "is not JSON: it is nested too deeply"),
    "no model": (changed(model=None), "model is a NoneType"),
    "vocab": (changed_model(vocab=[]), "model.vocab is a list"),
    "id text": (changed_model(vocab={"a": "0"}), r"model.vocab\['a'\] is '0'"),
    "id huge": (changed_model(vocab={"a": 2**60}), "it must be 0 to"),
    "id twice": (changed_model(vocab={"a": 0, "b": 0}), "one id to two tokens"),
    "merges": (changed_model(merges=[["x", "yy"]]), "cannot be loaded"),
    "added": (changed(added_tokens=[{"id": 3, "content": "x"}]), "names another token"),
    "added text": (changed(added_tokens=[{"id": 900, "content": 5}]), r"added_tokens\[0\].content"),
    "added surrogate": (changed(added_tokens=[{"id": 900, "content": "\ud800"}]), "Unicode text"),
    "vocab surrogate": (changed_model(vocab={"\ud800": 0}, merges=[]), "cannot be loaded"),
    "pattern": (
        changed(
            normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""},
        ),
        "cannot be loaded",
    ),
}


@pytest.mark.reliability
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name, tmp_path):
    content, message = HOSTILE[name]
    with pytest.raises(ModelFormatError, match=message) as caught:
        read(tmp_path, content)
    assert str(caught.value).startswith("tokenizer.json: ")


@pytest.mark.reliability
def test_endless_patterns_are_found_before_use(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_json, "PROBE_SECONDS", 2)
    split = {
        "type": "Split",
        "pattern": {"Regex": r"(?:a|aa|[a-z])+(?:a+)+\d\d"},
        "behavior": "Isolated",
        "invert": False,
    }
    content = json.loads(byte_level().to_str())
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, content["pre_tokenizer"]],
    }
    with pytest.raises(ModelFormatError, match=r"pattern|cannot be loaded"):
        read(tmp_path, content)


def test_other_kinds_are_unsupported(tmp_path):
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        read(tmp_path, changed_model(type="WordPiece"))


def test_config_tokens_must_exist(tmp_path):
    with pytest.raises(ModelFormatError, match="eos_token is '<none>', which is not a token"):
        read(tmp_path, byte_level().to_str(), {"eos_token": "<none>"})


def test_missing_and_too_large_files(tmp_path, monkeypatch):
    with pytest.raises(ModelFormatError, match="cannot be read"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    monkeypatch.setattr(tokenizer_json, "MAX_FILE_BYTES", 100)
    with pytest.raises(ModelFormatError, match="larger than 100 bytes"):
        read(tmp_path, byte_level().to_str())


def test_normalizer_of_the_file_is_kept(tmp_path):
    peer = byte_level()
    peer.normalizer = normalizers.NFC()
    tokenizer = read(tmp_path, peer.to_str())
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


# --- Ends, spaces and added tokens, as the library itself has them --------------------------------

SINGLES = ["$A", "<s> $A", "$A <|end|>", "<s> $A <|end|>", "<s> <s> $A", "$A <|im_end|>"]


@pytest.mark.parametrize("single", SINGLES)
def test_ends_are_those_of_the_post_processor(single, tmp_path):
    peer = byte_level()
    names = ("<s>", "<|end|>", "<|im_end|>")
    special = [(name, peer.token_to_id(name)) for name in names]
    peer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    config = {"bos_token": "<s>", "eos_token": "<|end|>"}
    tokenizer = read(tmp_path, peer.to_str(), config)
    assert tokenizer.add_bos == single.startswith("<s>")
    assert tokenizer.add_eos == single.endswith("<|end|>")
    for text in ("hello", "hell o"):
        ids = tokenizer.encode(text, add_special_tokens=True)
        if single not in ("<s> <s> $A", "$A <|im_end|>"):  # one of each, and the file's own EOS
            assert ids == peer.encode(text).ids
        inner = peer.encode(text, add_special_tokens=False).ids
        first = [tokenizer.bos_id] if tokenizer.add_bos else []
        assert ids == [*first, *inner, *([tokenizer.eos_id] if tokenizer.add_eos else [])]
    wanted = {"add_bos_token": not tokenizer.add_bos, "add_eos_token": not tokenizer.add_eos}
    changed_mind = read(tmp_path, peer.to_str(), {**config, **wanted})  # its value takes precedence
    assert changed_mind.add_bos is not tokenizer.add_bos
    assert changed_mind.add_eos is not tokenizer.add_eos


DECODERS = {
    "strip one": ([decoders.Strip(" ", 1, 0)], True),
    "strip at the end": ([decoders.Strip(" ", 0, 1)], False),
    "strip nothing": ([decoders.Strip(" ", 0, 0)], False),
    "strip another": ([decoders.Strip("_", 1, 0)], False),
    "no strip": ([], False),
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_space_in_front_goes_where_the_decoder_says_so(name, tmp_path):
    steps, strips = DECODERS[name]
    peer = sentencepiece_style()
    peer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *steps]
    )
    tokenizer = read(tmp_path, peer.to_str())
    assert tokenizer.strips_leading_space is strips
    for text in ("hello", " hello", "é hell", "hell  o"):
        ids = peer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == peer.decode(ids)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_metaspace_decoder_takes_what_it_put_in_front(scheme, tmp_path):
    peer = sentencepiece_style()
    peer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    peer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = read(tmp_path, peer.to_str())
    assert tokenizer.strips_leading_space == (scheme != "never")
    for text in ("hell", " hell", "hell hell"):
        ids = peer.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == peer.decode(ids)


def test_added_tokens_are_matched_wherever_plain_text_is_encoded(tmp_path):
    """User-defined ones in every text, control tokens where the caller allows them."""
    tokenizer = read(tmp_path, byte_level().to_str())
    think, end = tokenizer.encode("<think>"), tokenizer.control_tokens["<|end|>"]
    assert len(think) == 1
    assert set(tokenizer.control_tokens) == {"<s>", "<|end|>", "<|im_end|>"}
    text = "hello<think><|end|>hello"
    for encode in (tokenizer.encode, tokenizer.encode_inner):
        assert encode(text).count(think[0]) == 1
        assert end not in encode(text)
    ids = tokenizer.encode(text, parse_special=True)
    assert (ids.count(think[0]), ids.count(end)) == (1, 1)
    assert not tokenizer.is_special(think[0])
    assert tokenizer.is_special(end)


def test_role_tokens_of_deepseek_are_control_tokens(tmp_path):
    """Its files do not mark them as special, but no text of a user may become one."""
    whole = byte_level()
    bar = "\uff5c"
    names = [f"<{bar}User{bar}>", f"<{bar}tool▁sep{bar}>"]
    whole.add_tokens([*names, f"{bar}DSML{bar}", "</think>"])
    tokenizer = read(tmp_path, whole.to_str())
    assert set(tokenizer.control_tokens) == {"<s>", "<|end|>", "<|im_end|>", *names}
    for name in names:
        token_id = tokenizer.control_tokens[name]
        assert tokenizer.encode(name, parse_special=True) == [token_id]
        assert token_id not in tokenizer.encode(f"a{name}b")
        assert tokenizer.decode(tokenizer.encode(f"a{name}b")) == f"a{name}b"


@pytest.fixture(scope="module")
def worker():
    worker = TemplateWorker()
    yield worker
    worker.close()


def rendered(worker, tokenizer, source):
    template = ChatTemplate(source, worker=worker)
    return encode_chat(tokenizer, template, [{"role": "user", "content": "x"}])


def test_parts_of_a_prompt_are_marked_as_one_text(worker, tmp_path):
    """A prompt is cut at its control tokens; only its first part is the start of the text."""
    peer = sentencepiece_style()
    tokenizer = read(tmp_path, peer.to_str())
    for source in ("hell</s>hell", "</s>hell", "hell</s></s>hell</s>hell", "hell"):
        ids = peer.encode(source, add_special_tokens=False).ids
        assert rendered(worker, tokenizer, source) == ids


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("right", [True, False])
def test_control_tokens_take_whitespace_on_their_own_sides(worker, left, right, tmp_path):
    peer = byte_level()
    peer.add_special_tokens([tokenizers.AddedToken("<cut>", lstrip=left, rstrip=right)])
    tokenizer = read(tmp_path, peer.to_str(), {"add_bos_token": False})
    for source in ("a <cut> b", "<cut> <cut>", " <cut>\n\nb <cut>", "a<cut>b", "a \n<cut>"):
        ids = peer.encode(source, add_special_tokens=False).ids
        assert rendered(worker, tokenizer, source) == ids, source


@pytest.mark.parametrize("make", [byte_level, sentencepiece_style])
def test_the_vocabulary_ends_with_the_last_id_or_the_last_row(make, tmp_path):
    peer = make()
    size = peer.get_vocab_size(with_added_tokens=True)
    assert read(tmp_path, peer.to_str()).vocab_size == size
    for rows in (size, size + 1, size + 9):
        tokenizer = read(tmp_path, peer.to_str(), vocab_size=rows)
        assert tokenizer.vocab_size == rows
        assert tokenizer.unused_ids == tuple(range(size, rows))
    with pytest.raises(ModelFormatError, match=f"holds {size} tokens but the model has {size - 1}"):
        read(tmp_path, peer.to_str(), vocab_size=size - 1)
