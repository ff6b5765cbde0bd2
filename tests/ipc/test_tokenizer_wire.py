"""A tokenizer that travelled as bytes does what the one from the file does."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.gguf_files import tiny_model
from tests.tiny_llm import DATA, NAMES
from tiercel.ipc.tokenizer_wire import pack_tokenizer, unpack_tokenizer
from tiercel.models.source import open_source

TEXTS = ["", "the thin man", " naïve 你好 😀\n\n", "<|im_end|><s>x", "1234567 don't"]


def assert_equal(original, arrived):
    for text in TEXTS:
        for parse_special in (False, True):
            ids = original.encode(text, parse_special=parse_special, add_special_tokens=True)
            assert arrived.encode(text, parse_special=parse_special, add_special_tokens=True) == ids
            assert arrived.decode(ids) == original.decode(ids)
    assert arrived.vocab_size == original.vocab_size
    for name in ("bos_id", "eos_id", "pad_id", "stop_ids", "add_bos", "control_tokens"):
        assert getattr(arrived, name) == getattr(original, name), name
    for token_id in range(original.vocab_size):
        assert arrived.token_bytes(token_id, with_special=True) == original.token_bytes(
            token_id, with_special=True
        )


@pytest.mark.parametrize("name", NAMES)
def test_of_a_gguf_file(name):
    source = open_source(DATA / f"{name}.gguf")
    assert_equal(source.tokenizer(), unpack_tokenizer(pack_tokenizer(source)))


def test_of_the_default_model(default_model, tmp_path):
    source = open_source(default_model)
    wire_bytes = pack_tokenizer(source)
    assert len(wire_bytes) < 2 * 2**20
    assert_equal(source.tokenizer(tmp_path), unpack_tokenizer(wire_bytes, tmp_path))


def test_of_a_folder(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    source = replace(
        open_source(DATA / "llama-tiny.gguf"),
        path=tmp_path,
        tokenizer_data={
            "tokenizer_config": tokenizer_config,
            "generation_config": {"eos_token_id": [258, 3]},
        },
    )
    arrived = unpack_tokenizer(pack_tokenizer(source))
    assert_equal(source.tokenizer(), arrived)
    assert (arrived.vocab_size, arrived.stop_ids) == (272, (3, 258))


def test_tokens_that_are_no_utf8_keep_their_bytes(tmp_path):
    source = open_source(tiny_model(tmp_path / "m.gguf"))
    broken = b"\xff\xfeab".decode("utf-8", "surrogateescape")
    data = source.tokenizer_data
    object.__setattr__(data, "tokens", (*data.tokens[:-1], broken))
    tokenizer = unpack_tokenizer(pack_tokenizer(source))
    assert tokenizer.token_text(len(data.tokens) - 1) == broken
