"""Child process that compiles untrusted grammars before the engine does.

A schema of forty bytes can cost a compiler seconds and hundreds of megabytes. So this process
limits its own memory, and the parent kills it at its deadline. It runs the same code as the engine:
construction and the first mask, over the model's own vocabulary.

Messages, in the frames of `child_client.py`. The first one out is ``{"ready": true}``, the first
one in the vocabulary: ``tokens`` (bytes of all tokens together, base64), ``lengths``,
``control_ids``, ``stop_ids``; out: ``{"ready": true}``. Then in: ``text`` of a `GrammarSpec`,
``cpu_seconds``; out: ``{}`` or ``code``, ``message`` and ``hint`` of the refusal.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

sys.path.extend(sys.argv[2:])  # the folders of the packages

from tiercel.errors import InvalidRequestError
from tiercel.grammar.matcher import GrammarMatcher, GrammarVocabulary, TokenTable
from tiercel.grammar.spec import GrammarSpec
from tiercel.text.child_loop import (
    answer_requests,
    limit_memory,
    parent_id,
    read_message,
    write_message,
)


def read_vocabulary(message: Mapping[str, Any]) -> GrammarVocabulary:
    """Build the vocabulary; the tokenization of text does not matter here."""
    blob = base64.b64decode(message["tokens"])
    spans = pairwise(accumulate(message["lengths"], initial=0))
    table = TokenTable(
        tokens=tuple(blob[start:stop] for start, stop in spans),
        control_ids=tuple(message["control_ids"]),
        stop_ids=tuple(message["stop_ids"]),
    )
    ids = {token[0]: i for i, token in enumerate(table.tokens) if len(token) == 1}
    return GrammarVocabulary(
        table, lambda text: [ids[byte] for byte in text.encode() if byte in ids]
    )


def main() -> None:
    """Answer requests until the parent exits."""
    write_message({"ready": True})
    vocabulary = read_vocabulary(read_message(parent_id()))
    is_limited = limit_memory()

    def answer(request: dict[str, Any]) -> Mapping[str, object]:
        try:
            GrammarMatcher(vocabulary, GrammarSpec(request["text"]))
        except InvalidRequestError as error:
            return {"code": error.code, "message": str(error), "hint": error.hint}
        return {}

    write_message({"ready": True, "is_limited": is_limited})
    answer_requests(answer)


if __name__ == "__main__":
    main()
