"""The small trained DeepSeek-V4 of tests/data/small_v4, and prompts of text for it."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import Tokenizer

SMALL = Path(__file__).parent / "data/small_v4"
_TEXT = Path(__file__).parents[1] / "docs/models.md"


@functools.cache
def text_ids() -> tuple[int, ...]:
    """Token ids of a page of text."""
    tokenizer = Tokenizer.from_file(str(SMALL / "tokenizer.json"))
    return tuple(tokenizer.encode(_TEXT.read_text()).ids)


def text_prompts(count: int, length: int) -> list[dict[str, list[int]]]:
    """Prompts of some tokens, which begin at places of their own."""
    ids = text_ids()
    step = (len(ids) - length) // count
    return [{"prompt_token_ids": list(ids[i * step : i * step + length])} for i in range(count)]
