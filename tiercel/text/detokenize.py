"""Streaming decoder: ids in, text out, the pieces joined equal to decoding all ids at once.

A token may hold part of a character, so the unit here is the byte. Bytes that begin a character
wait until it is whole; bytes that can never complete one become U+FFFD at once, a character cut by
the end at `finish`. At most three bytes wait, and a push costs time in its own ids only.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from tiercel.text.tokenizer import Tokenizer


class Detokenizer:
    """Decoder of one answer.

    Args:
        tokenizer: gives the bytes of each id.
        skip_special_tokens: whether control tokens are left out; else their names are shown.
        is_continuation: the text goes on after a prompt, so a space that opens it is kept; False
            gives exactly what `Tokenizer.decode` gives for a text of its own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        is_continuation: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._with_special = not skip_special_tokens
        self._strips_space = tokenizer.strips_leading_space and not is_continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; return the text that is now certain.

        Raises:
            ArgumentError: an id outside the vocabulary; no id of this call is taken.
        """
        token_bytes = self._tokenizer.token_bytes
        new = b"".join([token_bytes(i, with_special=self._with_special) for i in ids])
        if new and self._strips_space:
            self._strips_space = False
            new = new.removeprefix(b" ")
        return self._decoder.decode(new)

    def finish(self) -> str:
        """End the text: U+FFFD if a character was cut, else nothing. Later calls give nothing."""
        return self._decoder.decode(b"", final=True)
