"""The tokenizer of a model as bytes, so that the HTTP process needs no model file.

Of a GGUF file these are its checked tokenizer fields; of a Hugging Face folder, its tokenizer
files, or the ids in its config files where it has no tokenizer. Building a tokenizer from them
takes up to a second: not on an event loop.
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tiercel.text.tokenizer import Tokenizer
from tiercel.text.tokenizer_data import TokenizerData

if TYPE_CHECKING:
    from tiercel.models.source import ModelSource


_ID_KEYS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


class _Fields(msgspec.Struct, array_like=True, tag=1):
    """`TokenizerData`, compact.

    Attributes:
        tokens: bytes, because a token need not be UTF-8.
        token_types: one byte each.
        scores: float64, little-endian.
        merges: u32 pairs of token ids, little-endian.
        cache_key: names the file's content.
    """

    name: str
    model: str
    pre: str
    tokens: list[bytes]
    token_types: bytes
    scores: bytes
    merges: bytes
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    unk_id: int | None
    pad_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    cache_key: str


class _Files(msgspec.Struct, array_like=True, tag=2):
    """``tokenizer.json`` as it is, with what its neighbours say."""

    content: bytes
    configs: dict[str, dict[str, Any]]
    vocab_size: int


class _Ids(msgspec.Struct, array_like=True, tag=3):
    """A folder without ``tokenizer.json``; see `Tokenizer.without_text`."""

    folder: str
    vocab_size: int
    config: dict[str, Any]
    generation: dict[str, Any]


def pack_tokenizer(source: ModelSource) -> bytes:
    """The tokenizer of a checked model."""
    data = source.tokenizer_data
    if isinstance(data, TokenizerData):
        return msgspec.msgpack.encode(_pack_fields(data, source.file_key))
    if not source.has_text:
        ids = {key: source.metadata[key] for key in _ID_KEYS if key in source.metadata}
        generation = data["generation_config"]
        return msgspec.msgpack.encode(
            _Ids(source.path.name, source.config.vocab_size, ids, generation)
        )
    content = (source.path / "tokenizer.json").read_bytes()
    return msgspec.msgpack.encode(_Files(content, dict(data), source.config.vocab_size))


def unpack_tokenizer(wire_bytes: bytes, cache_dir: Path | None = None) -> Tokenizer:
    """Build the tokenizer again.

    Args:
        wire_bytes: result of `pack_tokenizer`.
        cache_dir: keeps one that is slow to build; see `Tokenizer.from_gguf`.
    """
    packed = msgspec.msgpack.decode(wire_bytes, type=_Fields | _Files | _Ids)
    if isinstance(packed, _Ids):
        return Tokenizer.without_text(
            packed.folder, packed.vocab_size, packed.config, packed.generation
        )
    if isinstance(packed, _Files):
        return Tokenizer.from_json(
            "tokenizer.json",
            packed.content,
            packed.configs["tokenizer_config"],
            packed.configs["generation_config"],
            vocab_size=packed.vocab_size,
        )
    return Tokenizer.from_gguf(
        _unpack_fields(packed), cache_dir=cache_dir, cache_key=packed.cache_key
    )


def _pack_fields(data: TokenizerData, cache_key: str) -> _Fields:
    ids = {token: i for i, token in enumerate(data.tokens)}
    return _Fields(
        name=data.name,
        model=data.model,
        pre=data.pre,
        tokens=[token.encode("utf-8", "surrogateescape") for token in data.tokens],
        token_types=bytes(data.token_types),
        scores=_to_bytes(array("d", data.scores)),
        merges=_to_bytes(array("I", [ids[part] for pair in data.merges for part in pair])),
        bos_id=data.bos_id,
        eos_id=data.eos_id,
        eot_id=data.eot_id,
        unk_id=data.unk_id,
        pad_id=data.pad_id,
        add_bos=data.add_bos,
        add_eos=data.add_eos,
        add_space_prefix=data.add_space_prefix,
        cache_key=cache_key,
    )


def _unpack_fields(packed: _Fields) -> TokenizerData:
    tokens = tuple(token.decode("utf-8", "surrogateescape") for token in packed.tokens)
    walk = iter(_from_bytes(array("I"), packed.merges))
    return TokenizerData(
        name=packed.name,
        model=packed.model,
        pre=packed.pre,
        tokens=tokens,
        token_types=tuple(packed.token_types),
        scores=tuple(_from_bytes(array("d"), packed.scores)),
        merges=tuple((tokens[left], tokens[right]) for left, right in zip(walk, walk, strict=True)),
        bos_id=packed.bos_id,
        eos_id=packed.eos_id,
        eot_id=packed.eot_id,
        unk_id=packed.unk_id,
        pad_id=packed.pad_id,
        add_bos=packed.add_bos,
        add_eos=packed.add_eos,
        add_space_prefix=packed.add_space_prefix,
        chat_template=None,  # it travels apart, because a folder keeps it apart
    )


def _to_bytes(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _from_bytes(values: array[Any], blob: bytes) -> array[Any]:
    values.frombytes(blob)
    if sys.byteorder == "big":
        values.byteswap()
    return values
