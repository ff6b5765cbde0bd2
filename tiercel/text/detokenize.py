"""Streaming detokenizer: ids in, text out; the joined pieces equal decoding all ids together.

A token may contain part of a character, so the unit here is the byte. Bytes that begin a character
wait until it is complete; bytes that can never complete one become U+FFFD immediately, a character
cut by the end becomes U+FFFD at `finish`. At most three bytes wait, and the cost of a push depends
on its own ids only.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from tiercel.text.tokenizer import Tokenizer


class Detokenizer:
    """Decoder of one answer.

    Args:
        tokenizer: tokenizer that gives the bytes of each id.
        skip_special_tokens: whether control tokens are left out; else their names are shown.
        is_continuation: whether the text follows a prompt, so that a leading space is kept; False
            gives exactly the result of `Tokenizer.decode` for a separate text.
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
        """Add ids; return the text that is certain now.

        Raises:
            ArgumentError: an id outside the vocabulary; no id of this call is added.
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
