"""Reads the ids of special tokens from a folder's config files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.errors import ModelFormatError
from tiercel.text.tokenizer_data import shown


def read_ids(file: str, config: Mapping[str, object], key: str, vocab_size: int) -> tuple[int, ...]:
    """The ids under a key, which holds one id, a list of ids, or null.

    Args:
        file: name of the file in messages.
        config: content of the file.
        key: for instance ``eos_token_id``.
        vocab_size: ids are below it.

    Raises:
        ModelFormatError: another value, or an id outside the vocabulary.
    """
    value: Any = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        is_integer = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not (is_integer and 0 <= token_id < vocab_size):
            raise ModelFormatError(
                f"{file}: {key} is {shown(token_id)}.",
                hint=f"Token ids are 0 to {vocab_size - 1}.",
            )
    return tuple(ids)
