"""Tokenizer: text to ids and back, one class for GGUF metadata and for Hugging Face files.

There are two ways to encode. Plain (`parse_special=False`) is for the text of users: control tokens
such as ``<|im_end|>`` are ordinary characters. With `parse_special=True`, for rendered templates
and raw prompts, their text becomes their id. User-defined tokens are matched in both.

Decoding is ours, not the library's: each token has exact bytes (`token_bytes`), decoded text
is those bytes as UTF-8 with U+FFFD for invalid bytes, and streaming (`detokenize.py`) gives the
same text piece by piece.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from msgspec import Struct
from tokenizers import Tokenizer as Encoder

from tiercel.errors import ArgumentError, InvalidRequestError
from tiercel.text.special_ids import read_ids
from tiercel.text.tokenizer_build import SPACE_MARK, Encoders, build_encoders, is_unicode
from tiercel.text.tokenizer_data import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, TokenizerData
from tiercel.text.tokenizer_json import (
    TokenizerFile,
    parse_tokenizer_file,
    read_tokenizer_file,
)

# The regex engine gives up, by a panic, after 10 million steps in one match: 10 million
# spaces in a row are enough. A longer text is refused before that.
MAX_TEXT_CHARS: Final = 1 << 23
# Longer texts are encoded without the interpreter's lock: 0.5 MB take over a second.
_SHORT_CHARS: Final = 4 << 10
# End tokens of a turn or a text, by their name in a vocabulary.
STOP_NAMES: Final = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",  # Llama 3.1 ends a message that calls a tool with it
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<start_function_response>",  # FunctionGemma: the caller writes what follows
)
_HIDDEN_TYPES: Final = frozenset({UNKNOWN, CONTROL})


def _encode(encoder: Encoder, text: str) -> list[int]:
    """Ids of a text; a long text lets other threads run meanwhile."""
    if len(text) <= _SHORT_CHARS:
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
    else:  # a list, since `encode` keeps the lock; both give the same ids
        ids = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _byte_alphabet() -> dict[int, int]:
    """Code point to byte: printable Latin-1 bytes map to themselves, other bytes from U+0100 on.

    Source: bytes_to_unicode of github.com/openai/gpt-2, src/encoder.py.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR: Final = MappingProxyType(_byte_alphabet())


class SpecialTokens(Struct, frozen=True):
    """Ids with a role.

    Attributes:
        bos_id, eos_id, pad_id: ids, or None where the model has none.
        stop_ids: every id that ends an answer, ascending.
        add_bos, add_eos: whether an encoded input gets them when special tokens are requested.
    """

    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    stop_ids: tuple[int, ...]
    add_bos: bool
    add_eos: bool


class Tokenizer:
    """The tokenizer of one model, made by one of the methods below; threads may share it.

    Attributes:
        vocab_size: size of the vocabulary; ids are 0 to vocab_size - 1.
        bos_id, eos_id, pad_id: ids, or None.
        stop_ids: ids that end an answer, ascending.
        add_bos, add_eos: see `encode`.
        control_tokens: id by text of every control token.
        trimming: (strips whitespace before, after) by id, for the control tokens that strip any.
        unused_ids: ids without a meaning, which must not be sampled, ascending.
        strips_leading_space: whether encoding adds a space before a text and decoding strips it.
        chat_template: Jinja source from the file, or None.
    """

    def __init__(
        self,
        encoders: Encoders | None,
        tokens: Sequence[str],
        token_types: Sequence[int],
        special: SpecialTokens,
        *,
        is_byte_level: bool,
        strips_leading_space: bool,
        chat_template: str | None,
        no_text: str = "",
    ) -> None:
        self._encoders = encoders
        self._no_text = no_text
        self._tokens = tokens
        self._types = bytes(token_types)
        self._special = special
        self._is_byte_level = is_byte_level
        self.vocab_size = len(tokens)
        self.strips_leading_space = strips_leading_space
        self.chat_template = chat_template
        self.control_tokens: Mapping[str, int] = MappingProxyType(
            {tokens[i]: i for i in reversed(range(len(tokens))) if self._types[i] == CONTROL}
        )
        added_tokens = {} if encoders is None else encoders.chat.get_added_tokens_decoder()
        self.trimming: Mapping[int, tuple[bool, bool]] = MappingProxyType(
            {
                i: (added.lstrip, added.rstrip)
                for i, added in added_tokens.items()
                if added.special and (added.lstrip or added.rstrip)
            }
        )
        unused = () if encoders is None else (i for i, k in enumerate(self._types) if k == UNUSED)
        self.unused_ids = tuple(unused)

    @staticmethod
    def from_gguf(
        data: TokenizerData, *, cache_dir: Path | None = None, cache_key: str = ""
    ) -> Tokenizer:
        """Build from a GGUF file's fields.

        Args:
            data: the checked fields.
            cache_dir: folder for slow results; None: no cache. A folder that cannot be written
                costs a warning, a damaged entry is rebuilt.
            cache_key: identity of the file's content (its hash, or path, size and time of change).

        Raises:
            ModelFormatError: the vocabulary gives too many merges.
        """
        stops = {data.eos_id, data.eot_id} | {
            i
            for i, kind in enumerate(data.token_types)
            if kind == CONTROL and data.tokens[i] in STOP_NAMES
        }
        return Tokenizer(
            build_encoders(data, cache_dir, cache_key),
            data.tokens,
            data.token_types,
            SpecialTokens(
                bos_id=data.bos_id,
                eos_id=data.eos_id,
                pad_id=data.pad_id,
                stop_ids=tuple(sorted(i for i in stops if i is not None)),
                add_bos=data.add_bos and data.bos_id is not None,
                add_eos=data.add_eos and data.eos_id is not None,
            ),
            is_byte_level=data.model == "gpt2",
            strips_leading_space=data.model == "llama" and data.add_space_prefix,
            chat_template=data.chat_template,
        )

    @staticmethod
    def from_file(
        path: Path,
        tokenizer_config: Mapping[str, object] | None = None,
        generation_config: Mapping[str, object] | None = None,
        *,
        vocab_size: int | None = None,
    ) -> Tokenizer:
        """Read a Hugging Face ``tokenizer.json``.

        Args:
            path: the file.
            tokenizer_config: content of ``tokenizer_config.json``: bos, eos and pad tokens, chat
                template.
            generation_config: content of ``generation_config.json``: its eos ids are stop ids too.
            vocab_size: rows of the embedding; ids beyond the file's own are unused.

        Raises:
            ModelFormatError: the file or a field breaks its format.
            UnsupportedModelError: a tokenizer that is not byte-level or byte-fallback BPE.
        """
        return Tokenizer.from_json(
            path.name,
            read_tokenizer_file(path),
            tokenizer_config,
            generation_config,
            vocab_size=vocab_size,
        )

    @staticmethod
    def from_json(
        name: str,
        content: bytes,
        tokenizer_config: Mapping[str, object] | None = None,
        generation_config: Mapping[str, object] | None = None,
        *,
        vocab_size: int | None = None,
    ) -> Tokenizer:
        """Like `from_file`, for a file that was read already.

        Args:
            name: name of the file in messages.
            content: bytes of the file.
            tokenizer_config: see `from_file`.
            generation_config: see `from_file`.
            vocab_size: see `from_file`.

        Raises:
            ModelFormatError, UnsupportedModelError: as `from_file`.
        """
        file: TokenizerFile = parse_tokenizer_file(
            name, content, tokenizer_config or {}, generation_config or {}, vocab_size
        )
        stops = set(file.eos_ids) | {
            i
            for i, kind in enumerate(file.token_types)
            if kind == CONTROL and file.tokens[i] in STOP_NAMES
        }
        return Tokenizer(
            file.encoders,
            file.tokens,
            file.token_types,
            SpecialTokens(
                bos_id=file.bos_id,
                eos_id=file.eos_ids[0] if file.eos_ids else None,
                pad_id=file.pad_id,
                stop_ids=tuple(sorted(stops)),
                add_bos=file.add_bos and file.bos_id is not None,
                add_eos=file.add_eos and bool(file.eos_ids),
            ),
            is_byte_level=file.is_byte_level,
            strips_leading_space=file.strips_leading_space,
            chat_template=file.chat_template,
        )

    @staticmethod
    def without_text(
        folder: str, vocab_size: int, config: Mapping[str, object], generation: Mapping[str, object]
    ) -> Tokenizer:
        """The tokenizer of a folder without ``tokenizer.json``: ids alone, whose text is empty.

        Args:
            folder: name of the folder in messages.
            vocab_size: rows of the embedding.
            config: content of ``config.json``: BOS, EOS and padding ids.
            generation: content of ``generation_config.json``: its EOS ids end an answer too.

        Raises:
            ModelFormatError: an id outside the vocabulary.
        """
        bos, own, pad = (
            read_ids(f"{folder}/config.json", config, key, vocab_size)
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        )
        others = read_ids(
            f"{folder}/generation_config.json", generation, "eos_token_id", vocab_size
        )
        return Tokenizer(
            None,
            [f"token_id:{i}" for i in range(vocab_size)],
            bytes([UNUSED]) * vocab_size,
            SpecialTokens(
                bos_id=next(iter(bos), None),
                eos_id=next(iter((*own, *others)), None),
                pad_id=next(iter(pad), None),
                stop_ids=tuple(sorted({*own, *others})),
                add_bos=False,
                add_eos=False,
            ),
            is_byte_level=False,
            strips_leading_space=False,
            chat_template=None,
            no_text=no_text_reason(folder),
        )

    @property
    def has_text(self) -> bool:
        """Whether tokens have text; False for a tokenizer of ids alone."""
        return not self._no_text

    def require_text(self, param: str | None = None) -> None:
        """Refuse what needs text, if the tokenizer has ids alone.

        Args:
            param: field of the request that needs text.

        Raises:
            InvalidRequestError: the folder has no ``tokenizer.json``.
        """
        if self._no_text:
            raise InvalidRequestError(self._no_text, param=param)

    @property
    def bos_id(self) -> int | None:
        """The id at the start of an input, or None."""
        return self._special.bos_id

    @property
    def eos_id(self) -> int | None:
        """The id at the end of a text, or None."""
        return self._special.eos_id

    @property
    def pad_id(self) -> int | None:
        """The padding id, or None."""
        return self._special.pad_id

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer, ascending."""
        return self._special.stop_ids

    @property
    def add_bos(self) -> bool:
        """Whether `encode` puts BOS first when special tokens are requested."""
        return self._special.add_bos

    @property
    def add_eos(self) -> bool:
        """Whether `encode` puts EOS last when special tokens are requested."""
        return self._special.add_eos

    def encode(
        self, text: str, *, parse_special: bool = False, add_special_tokens: bool = False
    ) -> list[int]:
        """Turn text into ids.

        Args:
            text: any Unicode text; NUL is an ordinary character.
            parse_special: whether the text of a control token becomes its id. Never for a user's
                text.
            add_special_tokens: whether BOS and EOS are added where the model wants them; one that
                the text itself contains is not added again.

        Raises:
            InvalidRequestError: a lone surrogate, which is not Unicode text, or more than
                `MAX_TEXT_CHARS`; or any text, if the tokenizer has ids alone.
        """
        encoders = self._encoders_for(text)
        if encoders is None:
            return []
        ids = _encode(encoders.chat if parse_special else encoders.plain, text)
        if not add_special_tokens:
            return ids
        eos_id = self._special.eos_id
        if self._special.add_eos and eos_id is not None and ids[-1:] != [eos_id]:
            ids.append(eos_id)
        return self.with_bos(ids)

    def encode_inner(self, text: str) -> list[int]:
        """Encode plain text that follows other tokens of the same input.

        Raises:
            InvalidRequestError: as `encode`.
        """
        encoders = self._encoders_for(text)
        return [] if encoders is None else _encode(encoders.plain_inner, text)

    def _encoders_for(self, text: str) -> Encoders | None:
        """The encoders; None for an empty text where there are none."""
        check_text(text)
        if text:
            self.require_text()
        return self._encoders

    def with_bos(self, ids: list[int]) -> list[int]:
        """Put BOS first where the model wants it and the ids do not begin with it."""
        special = self._special
        if special.add_bos and special.bos_id is not None and ids[:1] != [special.bos_id]:
            return [special.bos_id, *ids]
        return ids

    def decode(
        self,
        ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
        is_continuation: bool = False,
    ) -> str:
        """Turn ids into text; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            skip_special_tokens: whether control tokens are left out; else their names are shown.
            is_continuation: whether the text follows a prompt, so that a leading space is kept.

        Raises:
            ArgumentError: an id outside the vocabulary.
        """
        with_special = not skip_special_tokens
        whole = b"".join([self.token_bytes(i, with_special=with_special) for i in ids])
        if self.strips_leading_space and not is_continuation:
            whole = whole.removeprefix(b" ")
        return whole.decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, with_special: bool = False) -> bytes:
        """The exact bytes that a token adds to a text.

        Args:
            token_id: 0 to vocab_size - 1.
            with_special: whether a control token gives its name; else it gives nothing. An unused
                token always gives nothing.

        Raises:
            ArgumentError: the id is outside the vocabulary.
        """
        i = self._checked(token_id)
        kind, token = self._types[i], self._tokens[i]
        if kind == UNUSED or (kind in _HIDDEN_TYPES and not with_special):
            return b""
        if kind == BYTE:
            return bytes((int(token[1:-1], 16),))  # named <0x00> to <0xFF>
        if kind != NORMAL:
            return token.encode("utf-8", "surrogateescape")
        if not self._is_byte_level:
            return token.replace(SPACE_MARK, " ").encode("utf-8", "surrogateescape")
        try:
            return bytes([_BYTE_OF_CHAR[ord(char)] for char in token])
        except KeyError:  # a character outside the byte alphabet: the token is literal text
            return token.encode("utf-8", "surrogateescape")

    def token_text(self, token_id: int) -> str:
        """The name of a token as its vocabulary writes it, for messages, templates and grammars.

        Raises:
            ArgumentError: the id is outside the vocabulary.
        """
        return self._tokens[self._checked(token_id)]

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves the id out by default.

        Raises:
            ArgumentError: the id is outside the vocabulary.
        """
        kind = self._types[self._checked(token_id)]
        return kind in _HIDDEN_TYPES or kind == UNUSED

    def _checked(self, token_id: int) -> int:
        try:
            i = operator.index(token_id)
        except TypeError:
            raise ArgumentError(
                f"token id of type {type(token_id).__name__} is not an integer."
            ) from None
        if not 0 <= i < self.vocab_size:
            shown = str(i) if abs(i) < 1 << 64 else "a huge integer"
            raise ArgumentError(
                f"token id {shown} is out of range.",
                hint=f"Use 0 to {self.vocab_size - 1}, the ids of this model.",
            )
        return i


def no_text_reason(folder: str) -> str:
    """Why a folder without ``tokenizer.json`` takes no text."""
    return f"{folder} has no tokenizer.json, so it takes token ids alone: pass prompt_token_ids."


def check_text(text: str, param: str | None = None) -> None:
    """Refuse text that UTF-8 cannot encode, and text over the limit.

    Raises:
        InvalidRequestError: a lone surrogate, with its position; more than `MAX_TEXT_CHARS`.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequestError(
            f"the text has {len(text)} characters; the limit is {MAX_TEXT_CHARS}.", param=param
        )
    if text.isascii() or is_unicode(text):
        return
    place = next(i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff")
    raise InvalidRequestError(
        f"the text holds the lone surrogate U+{ord(text[place]):04X} at character {place}.",
        hint="Send Unicode text; a surrogate pair must be complete.",
        param=param,
    )
