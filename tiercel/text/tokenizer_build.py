r"""Builder of `tokenizers` encoders from checked GGUF fields.

Two encoders share one BPE model, so the second costs nothing: `plain` matches only user-defined
tokens (type 4), `chat` also matches control tokens (type 3). Text of a user goes through `plain`,
where no string can end a turn.

A "llama" file has scores but no merges. They are derived: for every token, each split into two
tokens is a merge, ordered by descending score of the result, ties by id, then by the ids of the two
parts. For 262,144 tokens that is the slow part, so the merges are cached as pairs of token ids:
reading 3 MB of ids and building the model from them takes half the time of parsing the library's
own 10 MB of JSON.

Cache file, little-endian: magic ``TCLMRG1\\n`` (8 bytes), SHA-256 of all that follows it (32
bytes), SHA-256 of tokens, types and scores (32 bytes), then u32 pairs (left id, right id) in order
of rank.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from tiercel.errors import ModelFormatError
from tiercel.text.tokenizer_data import (
    CONTROL,
    MAX_MERGES,
    NORMAL,
    PREFIX,
    USER_DEFINED,
    TokenizerData,
)

_LOG = logging.getLogger(__name__)

SPACE_MARK: Final = "\u2581"  # SentencePiece's mark of a space

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_WORDS: Final = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: Final[dict[str, tuple[str, ...]]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_QWEN2,),
    "llama-bpe": (_QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1),),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        _DEEPSEEK_WORDS,
    ),
}
IGNORE_MERGES: Final = frozenset({"llama-bpe"})  # a whole piece in the vocabulary is used as is

_MAGIC: Final = b"TCLMRG1\n"
_HASH_BYTES: Final = 32


class Encoders(Struct, frozen=True):
    """The encoders of one vocabulary; all share one model.

    Attributes:
        plain: encoder that matches user-defined tokens only.
        chat: encoder that matches control tokens too.
        plain_inner: as `plain`, for text that is not at the start of the input (differs only where
            a tokenizer file marks the first word).
    """

    plain: Tokenizer
    chat: Tokenizer
    plain_inner: Tokenizer


def build_encoders(data: TokenizerData, cache_dir: Path | None, cache_key: str) -> Encoders:
    """Build the encoders of a GGUF file.

    Args:
        data: the checked fields.
        cache_dir: folder for derived merges, created if absent; None: no cache.
        cache_key: identity of the file's content, for instance its hash; "": no cache.

    Raises:
        ModelFormatError: the vocabulary gives too many merges.
    """
    is_byte_level = data.model == "gpt2"
    vocab = _make_vocab(data.tokens)
    if is_byte_level:
        model = models.BPE(vocab, list(data.merges), ignore_merges=data.pre in IGNORE_MERGES)
    else:
        unknown = data.unk_id if data.unk_id is not None else vocab.get("<unk>")
        model = models.BPE(
            vocab,
            _read_or_derive_merges(data, vocab, cache_dir, cache_key),
            unk_token=None if unknown is None else data.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    added = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(data.tokens, data.token_types, strict=True)
        if kind in (CONTROL, USER_DEFINED) and token in vocab and token
    ]
    plain, chat = Tokenizer(model), Tokenizer(model)
    if is_byte_level:
        plain.pre_tokenizer = chat.pre_tokenizer = _make_splitter(data)
    else:
        marker = _make_space_marker(add_prefix=data.add_space_prefix)
        plain.normalizer = chat.normalizer = marker
    plain.add_tokens([token for token in added if not token.special])
    chat.add_tokens(added)
    return Encoders(plain, chat, plain)


def _make_vocab(tokens: Sequence[str]) -> dict[str, int]:
    """Id by text; of equal texts the first; without tokens that are not Unicode text."""
    vocab = dict(zip(reversed(tokens), reversed(range(len(tokens))), strict=True))
    try:
        "".join(vocab).encode()
    except UnicodeEncodeError:
        return {token: i for token, i in vocab.items() if is_unicode(token)}
    return vocab


def is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogates, so that UTF-8 can encode it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _make_splitter(data: TokenizerData) -> pre_tokenizers.PreTokenizer:
    splits = SPLITS.get(data.pre)
    if splits is None:
        shown = repr(data.pre[:60])
        _LOG.warning(
            "%s: %spre is %s, unknown to Tiercel: text is split as for gpt-2",
            data.name,
            PREFIX,
            shown,
        )
        splits = SPLITS["gpt-2"]
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _make_space_marker(*, add_prefix: bool) -> normalizers.Normalizer:
    marker = normalizers.Replace(" ", SPACE_MARK)
    if not add_prefix:
        return marker
    return normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marker])


def _read_or_derive_merges(
    data: TokenizerData, vocab: dict[str, int], cache_dir: Path | None, cache_key: str
) -> list[tuple[str, str]]:
    if cache_dir is None or not cache_key:
        return _pair_up(data.tokens, derive_merges(data, vocab))
    path = cache_dir / f"merges-{hashlib.sha256(cache_key.encode()).hexdigest()[:32]}.bin"
    content_hash = _hash_content(data)
    ids = _read_cache(path, content_hash, len(data.tokens))
    if ids is None:
        ids = derive_merges(data, vocab)
        _write_cache(path, content_hash, ids)
    return _pair_up(data.tokens, ids)


def derive_merges(data: TokenizerData, vocab: dict[str, int]) -> array[int]:
    """Merges of a vocabulary with scores, as flat pairs of token ids in order of rank.

    Raises:
        ModelFormatError: more than `MAX_MERGES`.
    """
    merges = array("I")
    find = vocab.get
    # `reverse` keeps the order of equal scores, so ties are ordered by id.
    for result in sorted(range(len(data.tokens)), key=data.scores.__getitem__, reverse=True):
        if data.token_types[result] not in (NORMAL, USER_DEFINED):
            continue
        token = data.tokens[result]
        pairs = [
            (left, right)
            for cut in range(1, len(token))
            if (left := find(token[:cut])) is not None and (right := find(token[cut:])) is not None
        ]
        if len(pairs) > 1:
            pairs.sort()
        for pair in pairs:
            merges.extend(pair)
        if len(merges) > 2 * MAX_MERGES:
            raise ModelFormatError(
                f"{data.name}: {PREFIX}tokens give more than {MAX_MERGES} merges, the limit."
            )
    return merges


def _pair_up(tokens: Sequence[str], ids: Iterable[int]) -> list[tuple[str, str]]:
    walk = iter(ids)
    return [(tokens[left], tokens[right]) for left, right in zip(walk, walk, strict=True)]


def _hash_content(data: TokenizerData) -> bytes:
    digest = hashlib.sha256("\0".join(data.tokens).encode("utf-8", "surrogatepass"))
    digest.update(bytes(data.token_types))
    digest.update(array("d", data.scores).tobytes())
    return digest.digest()


def _read_cache(path: Path, content_hash: bytes, vocab_size: int) -> array[int] | None:
    """The cached merges, or None if there are none; a damaged entry is removed."""
    try:
        blob = path.read_bytes()
    except OSError:
        return None
    body = blob[len(_MAGIC) + _HASH_BYTES :]
    head = _MAGIC + hashlib.sha256(body).digest()
    if (
        blob.startswith(head)
        and body.startswith(content_hash)
        and (len(body) - _HASH_BYTES) % 8 == 0
    ):
        ids = array("I", body[_HASH_BYTES:])
        if sys.byteorder == "big":
            ids.byteswap()
        if not ids or max(ids) < vocab_size:
            return ids
    _LOG.warning("tokenizer cache entry %s is damaged or out of date: made again", path.name)
    with suppress(OSError):
        path.unlink()
    return None


def _write_cache(path: Path, content_hash: bytes, ids: array[int]) -> None:
    """Write under a temporary name, flush, rename; an unwritable folder is not an error."""
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    body = content_hash + ids.tobytes()
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(body).digest() + body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        _LOG.warning("tokenizer cache cannot be written: %s", error.strerror)
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)
