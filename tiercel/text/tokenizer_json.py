"""Reader of Hugging Face ``tokenizer.json``: checks, a trial in a child process, then encoders.

The file is untrusted: it is parsed here, its vocabulary and added tokens are checked,
and the library loads it first in a child (`tokenizer_probe.py`), where a crash or an endless
regular expression ends only the child. Regular expressions outside a list of known ones are also
tried there on hard texts.

Added tokens become part of the model's vocabulary, so that `plain` and `chat` can share one model
and still give each token the id of the file: special tokens are control tokens, other added tokens
are user-defined. DeepSeek's files do not mark role tokens such as ``<｜User｜>`` as special. By
their form they are control tokens here, as in llama.cpp's GGUF files, so that no text of a user
becomes one.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct
from tokenizers import AddedToken, Tokenizer

from tiercel.errors import ModelFormatError, UnsupportedModelError
from tiercel.text.child import isolated_command
from tiercel.text.tokenizer_build import SPLITS, Encoders, is_unicode
from tiercel.text.tokenizer_data import (
    BYTE,
    BYTE_NAME,
    CONTROL,
    MAX_TOKEN_CHARS,
    MAX_TOKENS,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    shown,
)

MAX_FILE_BYTES: Final = 256 << 20
PROBE_SECONDS: Final = 60
_PROBE_BYTES: Final = 2 << 30  # in addition to 16 times the file
_KNOWN_PATTERNS: Final = frozenset(p for patterns in SPLITS.values() for p in patterns)
_BAR: Final = "\uff5c"  # the full-width bar of DeepSeek's tokens
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized")

Json = Mapping[str, object]


class TokenizerFile(Struct, frozen=True):
    """A checked tokenizer file; fields as in `tokenizer_data.TokenizerData`.

    Attributes:
        eos_ids: end ids, the tokenizer's own first, then those of the generation config.
        strips_leading_space: whether decoding removes one space at the start of the text.
    """

    encoders: Encoders
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    add_bos: bool
    add_eos: bool
    is_byte_level: bool
    strips_leading_space: bool
    chat_template: str | None


def parse_tokenizer_file(
    name: str,
    content: bytes,
    tokenizer_config: Json,
    generation_config: Json,
    vocab_size: int | None,
) -> TokenizerFile:
    """Check the file, try it in a child process, build the encoders.

    Args:
        name: name of the file in messages.
        content: content of ``tokenizer.json``.
        tokenizer_config: content of ``tokenizer_config.json``.
        generation_config: content of ``generation_config.json``.
        vocab_size: rows of the embedding, or None: the file's own size.

    Raises:
        ModelFormatError: a file or field that breaks its format.
        UnsupportedModelError: neither a byte-level nor a byte-fallback BPE.
    """
    root = _parse_json(name, content)
    model = _mapping(root.get("model"), name, "model")
    vocab = _read_vocab(model, name)
    added = _read_added(root, vocab, name)
    pipeline = {key: root.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")}
    is_byte_level = any(part.get("type") == "ByteLevel" for part in _walk(pipeline))
    if model.get("type", "BPE") != "BPE" or not (
        is_byte_level or model.get("byte_fallback") is True
    ):
        raise UnsupportedModelError(
            f"{name}: model.type is {shown(model.get('type'))}; Tiercel reads"
            " byte-level BPE and BPE with byte_fallback."
        )
    merged = {**vocab, **{token.content: token_id for token, token_id in added}}
    encoders = _build(name, pipeline, {**model, "vocab": merged}, [token for token, _ in added])
    roles = _Roles(name, merged, tokenizer_config, generation_config, _template_ends(root))
    tokens, types = _tabulate(merged, added, is_byte_level=is_byte_level)
    missing = 0 if vocab_size is None else vocab_size - len(tokens)
    if missing < 0:
        raise ModelFormatError(
            f"{name}: holds {len(tokens)} tokens but the model has {vocab_size} rows."
        )
    return TokenizerFile(
        encoders=encoders,
        tokens=tokens + ("",) * missing,
        token_types=types + (UNUSED,) * missing,
        bos_id=roles.bos_id(),
        eos_ids=roles.eos_ids(),
        pad_id=roles.named("pad_token"),
        add_bos=roles.adds("add_bos_token", at_end=False),
        add_eos=roles.adds("add_eos_token", at_end=True),
        is_byte_level=is_byte_level,
        strips_leading_space=_strips_leading_space(pipeline["decoder"]),
        chat_template=_chat_template(name, tokenizer_config),
    )


def read_tokenizer_file(path: Path) -> bytes:
    """The content of a tokenizer file.

    Raises:
        ModelFormatError: it cannot be read, or is larger than `MAX_FILE_BYTES`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ModelFormatError(f"{path.name}: cannot be read: {error.strerror}.") from None
    if len(content) > MAX_FILE_BYTES:
        raise ModelFormatError(f"{path.name}: is larger than {MAX_FILE_BYTES} bytes, the limit.")
    return content


def _parse_json(name: str, content: bytes) -> Json:
    try:
        root = json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = (
            "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        )
        raise ModelFormatError(f"{name}: is not JSON: {reason}.") from None
    return _mapping(root, name, "the file")


def _mapping(value: object, name: str, key: str) -> Json:
    if not isinstance(value, dict):
        raise ModelFormatError(f"{name}: {key} is {shown(value)}; it must be an object.")
    return value


def _read_vocab(model: Json, name: str) -> dict[str, int]:
    vocab = _mapping(model.get("vocab"), name, "model.vocab")
    checked: dict[str, int] = {}
    for token, token_id in vocab.items():
        checked[token] = _checked_id(token_id, name, f"model.vocab[{shown(token)}]")
        if len(token) > MAX_TOKEN_CHARS:
            raise ModelFormatError(
                f"{name}: a token has {len(token)} characters; at most {MAX_TOKEN_CHARS}."
            )
    if len(set(checked.values())) != len(checked):
        raise ModelFormatError(f"{name}: model.vocab gives one id to two tokens; ids must differ.")
    return checked


def _checked_id(value: object, name: str, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_TOKENS:
        raise ModelFormatError(
            f"{name}: {key} is {shown(value)}; it must be 0 to {MAX_TOKENS - 1}."
        )
    return value


def _read_added(root: Json, vocab: Mapping[str, int], name: str) -> list[tuple[AddedToken, int]]:
    entries = root.get("added_tokens") or []
    if not isinstance(entries, list):
        raise ModelFormatError(f"{name}: added_tokens is {shown(entries)}; it must be an array.")
    taken = {token_id: token for token, token_id in vocab.items()}
    added = []
    for i, raw in enumerate(entries):
        key = f"added_tokens[{i}]"
        entry = _mapping(raw, name, key)
        content = entry.get("content")
        is_text = isinstance(content, str) and is_unicode(content)
        if not isinstance(content, str) or not is_text or not 0 < len(content) <= MAX_TOKEN_CHARS:
            rule = f"it must be Unicode text of 1 to {MAX_TOKEN_CHARS} characters"
            raise ModelFormatError(f"{name}: {key}.content is {shown(content)}; {rule}.")
        token_id = _checked_id(entry.get("id"), name, f"{key}.id")
        if (
            taken.setdefault(token_id, content) != content
            or vocab.get(content, token_id) != token_id
        ):
            raise ModelFormatError(
                f"{name}: {key}.id is {token_id}, which names another token too."
            )
        flags = {flag: entry.get(flag, False) is True for flag in _FLAGS}
        is_role = content.startswith(f"<{_BAR}") and content.endswith(f"{_BAR}>")
        is_special = is_role or entry.get("special") is True
        added.append((AddedToken(content, special=is_special, **flags), token_id))
    return added


def _walk(value: object) -> Iterator[Json]:
    """Every object inside a JSON value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


def _build(name: str, pipeline: Json, model: Json, added: list[AddedToken]) -> Encoders:
    whole = json.dumps({"version": "1.0", "added_tokens": [], **pipeline, "model": model})
    patterns = {part["Regex"] for part in _walk(pipeline) if "Regex" in part}
    _try_in_child(name, whole, probe=not patterns <= _KNOWN_PATTERNS)
    outer = Tokenizer.from_str(whole)
    # A Metaspace step with "first" marks the first word of the input, not of each piece of it.
    inner_pipeline = json.dumps(pipeline).replace(
        '"prepend_scheme": "first"', '"prepend_scheme": "never"'
    )
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    inner = Tokenizer.from_str(
        json.dumps({"version": "1.0", **json.loads(inner_pipeline), "model": empty})
    )
    plain, chat, plain_inner = (Tokenizer(outer.model) for _ in range(3))
    for encoder, source in ((plain, outer), (chat, outer), (plain_inner, inner)):
        if source.normalizer is not None:
            encoder.normalizer = source.normalizer
        if source.pre_tokenizer is not None:
            encoder.pre_tokenizer = source.pre_tokenizer
    user_defined = [token for token in added if not token.special]
    plain.add_tokens(user_defined)
    plain_inner.add_tokens(user_defined)
    chat.add_tokens(added)
    return Encoders(plain, chat, plain_inner)


def _try_in_child(name: str, whole: str, *, probe: bool) -> None:
    content = whole.encode()
    settings = {
        "probe": probe,
        "cpu_s": PROBE_SECONDS,
        "data_bytes": _PROBE_BYTES + 16 * len(content),
    }
    try:
        done = subprocess.run(
            isolated_command("tokenizer_probe.py", ("tokenizers",)),
            input=json.dumps(settings).encode() + b"\n" + content,
            capture_output=True,
            timeout=PROBE_SECONDS,
            env={},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelFormatError(
            f"{name}: could not be loaded in {PROBE_SECONDS} s; a pattern in it may never end."
        ) from None
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [
            "the loader crashed"
        ]
        reason = lines[-1].removeprefix("Exception: ")[:300]
        raise ModelFormatError(f"{name}: the tokenizer cannot be loaded: {reason}.")


def _tabulate(
    vocab: Mapping[str, int], added: list[tuple[AddedToken, int]], *, is_byte_level: bool
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Tokens and types by id; ids without a token are unused."""
    num_tokens = 1 + max(vocab.values(), default=-1)
    tokens, types = [""] * num_tokens, [UNUSED] * num_tokens
    for token, token_id in vocab.items():
        tokens[token_id] = token
        is_byte = not is_byte_level and BYTE_NAME.fullmatch(token)
        types[token_id] = BYTE if is_byte else NORMAL
    for added_token, token_id in added:
        types[token_id] = CONTROL if added_token.special else USER_DEFINED
    return tuple(tokens), tuple(types)


def _strips_leading_space(decoder: object) -> bool:
    """Whether the decoder removes the space that encoding put before the text."""
    for part in _walk(decoder):
        if part.get("type") == "Strip" and part.get("content") == " " and part.get("start"):
            return True
        if part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return part.get("add_prefix_space", True) is not False
    return False


def _template_ends(root: Json) -> tuple[str | None, str | None]:
    """The special tokens that the file's post-processor puts before and after a text."""
    for part in _walk(root.get("post_processor")):
        single = part.get("single")
        if part.get("type") == "TemplateProcessing" and isinstance(single, list) and single:
            texts = []
            for end in (single[0], single[-1]):
                inner = end.get("SpecialToken") if isinstance(end, dict) else None
                content = inner.get("id") if isinstance(inner, dict) else None
                texts.append(content if isinstance(content, str) else None)
            return texts[0], texts[1]
    return None, None


def _chat_template(name: str, config: Json) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelFormatError(f"{name}: chat_template is {shown(template)}; it must be a string.")
    return template


class _Roles(Struct, frozen=True):
    """The role of each token: from the two config files, then the file's own post-processor."""

    name: str
    vocab: Mapping[str, int]
    config: Json
    generation: Json
    ends: tuple[str | None, str | None]

    def named(self, key: str) -> int | None:
        value = self.config.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        if content is None:
            return None
        if not isinstance(content, str) or content not in self.vocab:
            raise ModelFormatError(
                f"{self.name}: {key} is {shown(content)}, which is not a token of the file."
            )
        return self.vocab[content]

    def numbered(self, key: str) -> tuple[int, ...]:
        value = self.generation.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(_checked_id(i, self.name, key) for i in ids)

    def bos_id(self) -> int | None:
        own = self.named("bos_token")
        if own is None and self.ends[0] is not None:
            own = self.vocab.get(self.ends[0])
        return own if own is not None else next(iter(self.numbered("bos_token_id")), None)

    def eos_ids(self) -> tuple[int, ...]:
        own = self.named("eos_token")
        ids = (() if own is None else (own,)) + self.numbered("eos_token_id")
        return tuple(dict.fromkeys(ids))

    def adds(self, key: str, *, at_end: bool) -> bool:
        value = self.config.get(key)
        if isinstance(value, bool):
            return value
        end = self.ends[at_end]
        own = self.vocab.get(end) if end is not None else None
        return own is not None and own in (self.eos_ids() if at_end else (self.bos_id(),))
