"""The tokenizer fields of a GGUF file, checked one by one.

Metadata is hostile until checked: each rule here names the key, the value found and the value
allowed, so that later code never meets a wrong type, a wrong length or an id outside the
vocabulary. Arrays may arrive as lists or as objects with ``tolist`` (NumPy views): this module
imports neither.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from typing import Any, Final

from tiercel.errors import ModelFormatError, UnsupportedModelError

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6

PREFIX: Final = "tokenizer.ggml."
MODELS: Final = ("gpt2", "llama")  # byte-level BPE; SentencePiece-style BPE with scores
MAX_TOKENS: Final = 1 << 22
MAX_TOKEN_CHARS: Final = 1024  # splits of a token cost its length squared; real ones stay below 300
MAX_TOTAL_CHARS: Final = 1 << 24  # the 262,144 tokens of Gemma 3 hold about 2 million
MAX_MERGES: Final = 1 << 22
_KNOWN_TYPES: Final = frozenset(range(NORMAL, BYTE + 1))
BYTE_NAME: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SHOWN_CHARS: Final = 60


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """The tokenizer fields of one GGUF file; build it with `from_gguf`, which checks them.

    Attributes:
        name: file name at the start of every message.
        model: "gpt2" (byte-level BPE) or "llama" (SentencePiece-style BPE).
        pre: name of the split rule of "gpt2"; "" where absent.
        tokens: text by id.
        token_types: types by id, `NORMAL` .. `BYTE`, same length.
        scores: scores by id, same length, finite; empty where absent.
        merges: (left, right) pairs in order of rank; empty for "llama".
        bos_id, eos_id, eot_id, unk_id, pad_id: ids inside the vocabulary, or None.
        add_bos, add_eos, add_space_prefix: the file's values, or llama.cpp's defaults.
        chat_template: Jinja source, or None.
    """

    name: str
    model: str
    pre: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[tuple[str, str], ...]
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    unk_id: int | None
    pad_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | None

    @staticmethod
    def from_gguf(metadata: Mapping[str, object], name: str) -> TokenizerData:
        """Check every tokenizer field of a GGUF file.

        Args:
            metadata: all key-value pairs; array values are sequences or have ``tolist``.
            name: name of the file in messages, without its folder.

        Raises:
            ModelFormatError: a field is missing, of a wrong type, or breaks a rule.
            UnsupportedModelError: a valid file with another kind of tokenizer.

        Source: the keys of docs/gguf.md in github.com/ggml-org/ggml.
        """
        fields = _Fields(metadata, name)
        model = fields.text(PREFIX + "model")
        if model not in MODELS:
            raise UnsupportedModelError(
                f"{name}: {PREFIX}model is {shown(model)}; Tiercel reads 'gpt2' and 'llama'."
            )
        is_llama = model == "llama"
        tokens = _read_tokens(fields)
        types = _read_types(fields, len(tokens))
        _check_distinct(fields, tokens, types)
        _check_byte_names(fields, tokens, types)
        return TokenizerData(
            name=name,
            model=model,
            pre=fields.text(PREFIX + "pre", default=""),
            tokens=tokens,
            token_types=types,
            scores=_read_scores(fields, len(tokens), required=is_llama),
            merges=() if is_llama else _read_merges(fields, tokens),
            bos_id=fields.token_id("bos_token_id", len(tokens)),
            eos_id=fields.token_id("eos_token_id", len(tokens)),
            eot_id=fields.token_id("eot_token_id", len(tokens)),
            unk_id=fields.token_id("unknown_token_id", len(tokens)),
            pad_id=fields.token_id("padding_token_id", len(tokens)),
            add_bos=fields.boolean("add_bos_token", default=is_llama),
            add_eos=fields.boolean("add_eos_token", default=False),
            add_space_prefix=fields.boolean("add_space_prefix", default=is_llama),
            chat_template=fields.text("tokenizer.chat_template", default="") or None,
        )


def shown(value: object) -> str:
    """A value for a message: escaped and short."""
    if isinstance(value, str):
        text = repr(value[:_SHOWN_CHARS])
        return text if len(value) <= _SHOWN_CHARS else f"{text}... ({len(value)} characters)"
    if isinstance(value, bool | int | float):
        is_huge = isinstance(value, int) and abs(value) >= 1 << 64
        return "a huge integer" if is_huge else repr(value)
    return f"a {type(value).__name__}"


class _Fields:
    """Typed access to the metadata; a broken rule raises `ModelFormatError`."""

    def __init__(self, metadata: Mapping[str, object], name: str) -> None:
        self._metadata = metadata
        self._name = name

    def error(self, key: str, found: str, rule: str) -> ModelFormatError:
        return ModelFormatError(f"{self._name}: {key} {found}; {rule}.")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._metadata.get(key, default)
        if value is None:
            raise self.error(key, "is missing", "it must be a string")
        if not isinstance(value, str):
            raise self.error(key, f"is {shown(value)}", "it must be a string")
        return str(value)

    def array(self, key: str, *, required: bool) -> list[Any]:
        value = self._metadata.get(key)
        if value is None and not required:
            return []
        if value is None:
            raise self.error(key, "is missing", "it must be an array")
        if isinstance(value, list | tuple):
            return list(value)
        convert = getattr(value, "tolist", None)
        items = convert() if callable(convert) else None
        if not isinstance(items, list):
            raise self.error(key, f"is {shown(value)}", "it must be an array")
        return items

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self._metadata.get(PREFIX + key, default)
        # NumPy arrays have `item` too, and a length.
        is_scalar = not hasattr(value, "__len__")
        plain = value.item() if is_scalar and hasattr(value, "item") else value
        if not isinstance(plain, bool):
            raise self.error(PREFIX + key, f"is {shown(plain)}", "it must be a boolean")
        return plain

    def token_id(self, key: str, vocab_size: int) -> int | None:
        value = self._metadata.get(PREFIX + key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise self.error(PREFIX + key, f"is {shown(value)}", "it must be an integer")
        token_id = operator.index(value)
        if not 0 <= token_id < vocab_size:
            rule = f"it must be 0 to {vocab_size - 1}, the ids of the vocabulary"
            raise self.error(PREFIX + key, f"is {shown(token_id)}", rule)
        return token_id


def _read_tokens(fields: _Fields) -> tuple[str, ...]:
    key = PREFIX + "tokens"
    tokens = fields.array(key, required=True)
    if not 1 <= len(tokens) <= MAX_TOKENS:
        raise fields.error(key, f"holds {len(tokens)} tokens", f"it must hold 1 to {MAX_TOKENS}")
    lengths = _lengths(tokens)
    if max(lengths) > MAX_TOKEN_CHARS or min(lengths) < 0:
        i = next(i for i, length in enumerate(lengths) if not 0 <= length <= MAX_TOKEN_CHARS)
        if lengths[i] < 0:
            found = f"is {shown(tokens[i])}"
            raise fields.error(f"{key}[{i}]", found, "every token must be a string")
        rule = f"a token holds at most {MAX_TOKEN_CHARS}"
        raise fields.error(f"{key}[{i}]", f"has {lengths[i]} characters", rule)
    if sum(lengths) > MAX_TOTAL_CHARS:
        rule = f"the limit is {MAX_TOTAL_CHARS}"
        raise fields.error(key, f"holds {sum(lengths)} characters", rule)
    return tuple(tokens)


def _lengths(texts: Sequence[Any]) -> list[int]:
    """Characters of each text; -1 for what is no text."""
    if set(map(type, texts)) == {str}:
        return list(map(len, texts))
    return [len(text) if isinstance(text, str) else -1 for text in texts]


def _read_types(fields: _Fields, vocab_size: int) -> tuple[int, ...]:
    key = PREFIX + "token_type"
    types = fields.array(key, required=False)
    if not types:
        return (NORMAL,) * vocab_size
    _check_length(fields, key, len(types), vocab_size)
    # A vocabulary has a hundred thousand entries and is sound: it is checked as a whole, and entry
    # by entry only to say which one is wrong.
    if set(map(type, types)) == {int} and set(types) <= _KNOWN_TYPES:
        return tuple(types)
    checked = []
    for i, kind in enumerate(types):
        if not isinstance(kind, int) or isinstance(kind, bool):
            raise fields.error(f"{key}[{i}]", f"is {shown(kind)}", "it must be an integer")
        # llama.cpp writes 0 for tokens without a type; it treats them as ordinary text.
        if not 0 <= kind <= BYTE:
            raise fields.error(f"{key}[{i}]", f"is {shown(kind)}", f"it must be 0 to {BYTE}")
        checked.append(kind or NORMAL)
    return tuple(checked)


def _read_scores(fields: _Fields, vocab_size: int, *, required: bool) -> tuple[float, ...]:
    key = PREFIX + "scores"
    scores = fields.array(key, required=required)
    if not scores and not required:
        return ()
    _check_length(fields, key, len(scores), vocab_size)
    checked = []
    for i, score in enumerate(scores):
        if not isinstance(score, int | float) or isinstance(score, bool):
            raise fields.error(f"{key}[{i}]", f"is {shown(score)}", "it must be a number")
        if not math.isfinite(score):
            raise fields.error(f"{key}[{i}]", f"is {score}", "it must be finite")
        checked.append(float(score))
    return tuple(checked)


def _check_length(fields: _Fields, key: str, length: int, vocab_size: int) -> None:
    if length != vocab_size:
        rule = f"it must have one for each of the {vocab_size} tokens"
        raise fields.error(key, f"has {length} entries", rule)


def _check_distinct(fields: _Fields, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Refuse two tokens of one text, one of which would be unreachable; padding may repeat."""
    if len(set(tokens)) == len(tokens):
        return
    first: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if types[i] != UNUSED and first.setdefault(token, i) != i:
            found = f"is {shown(token)}, the same as token {first[token]}"
            raise fields.error(f"{PREFIX}tokens[{i}]", found, "tokens in use must differ")


def _check_byte_names(fields: _Fields, tokens: Sequence[str], types: Sequence[int]) -> None:
    if BYTE not in types:
        return
    for i, kind in enumerate(types):
        if kind == BYTE and not BYTE_NAME.fullmatch(tokens[i]):
            rule = "byte tokens (type 6) are named <0x00> to <0xFF>"
            raise fields.error(f"{PREFIX}tokens[{i}]", f"is {shown(tokens[i])}", rule)


def _read_merges(fields: _Fields, tokens: Sequence[str]) -> tuple[tuple[str, str], ...]:
    key = PREFIX + "merges"
    merges = fields.array(key, required=True)
    if len(merges) > MAX_MERGES:
        raise fields.error(key, f"holds {len(merges)} merges", f"the limit is {MAX_MERGES}")
    known = set(tokens)
    pairs = _split_merges(merges, known)
    if pairs is not None:
        return tuple(pairs)
    pairs = []
    for i, merge in enumerate(merges):
        if not isinstance(merge, str):
            raise fields.error(f"{key}[{i}]", f"is {shown(merge)}", "every merge must be a string")
        # A token of one space may be on the left: the separator is the first space after it.
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 1 or not right:
            rule = "a merge is two tokens with a space between"
            raise fields.error(f"{key}[{i}]", f"is {shown(merge)}", rule)
        for part in (left, right, left + right):
            if part not in known:
                found = f"is {shown(merge)}, and {shown(part)} is not a token"
                raise fields.error(f"{key}[{i}]", found, "both parts and their join must be tokens")
        pairs.append((left, right))
    return tuple(pairs)


def _split_merges(merges: Sequence[Any], known: set[str]) -> list[tuple[str, str]] | None:
    """The pairs of merges; None unless all are sound, for then one has to be named."""
    if set(map(type, merges)) != {str}:
        return None
    pairs = [tuple(merge.split(" ")) for merge in merges]
    parts = set(chain.from_iterable(pairs))
    is_sound = (
        set(map(len, pairs)) == {2}
        and "" not in parts
        and parts <= known
        and known.issuperset(map("".join, pairs))
    )
    return pairs if is_sound else None
