"""Prompts and continuations for speculative decoding, made from this repository's own files.

Two jobs have answers that quote their prompts, and one has an answer that never repeats anything:

    summary   a page of the documentation; the answer quotes sentences of it between its own words
    edit      a source file; the answer is the file with some names changed
    random    words without any order

Words and marks are tokens, numbered in the order in which they first appear.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = ("summary", "edit", "random")
_WORD = re.compile(r"\n|\s*\w+|\s*[^\w\s]")
_OWN_WORDS = ("the page says that", "and then it adds", "which means", "in short", "finally")
FIRST_ID = 300  # ids below belong to bytes and controls

# For a model that writes its own answers: a file that SmolLM2 repeats, mostly unchanged.
EDIT_PROMPT = '''Rewrite this file with `self` renamed to `this`:

```python
class Cart:
    """The goods that one customer wants to buy."""

    def __init__(self, customer, currency):
        self.customer = customer
        self.currency = currency
        self.lines = []
        self.coupons = []

    def add(self, article, count=1):
        """Add some pieces of an article."""
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        for line in self.lines:
            if line.article == article:
                line.count += count
                return line
        line = Line(article, count)
        self.lines.append(line)
        return line

    def remove(self, article):
        """Remove an article, whatever its count."""
        self.lines = [line for line in self.lines if line.article != article]

    def redeem(self, coupon):
        """Redeem a coupon, once."""
        if coupon.code in (other.code for other in self.coupons):
            raise ValueError(f"coupon {coupon.code} was redeemed before")
        self.coupons.append(coupon)

    def total(self):
        """The price of all lines, less the coupons."""
        price = sum(line.count * line.article.price for line in self.lines)
        for coupon in self.coupons:
            price -= coupon.discount(price)
        return max(price, 0)

    def is_empty(self):
        """Whether there is nothing to buy."""
        return not self.lines
```'''


@dataclass(frozen=True)
class Job:
    """Token ids of a prompt, and of what a model would answer."""

    prompt: list[int]
    answer: list[int]


class Numbers:
    """Numbers words with ids, in order of appearance, below `vocab_size`."""

    def __init__(self, vocab_size: int) -> None:
        self._ids: dict[str, int] = {}
        self._vocab_size = vocab_size

    def of(self, text: str) -> list[int]:
        """The ids of a text."""
        ids = self._ids
        return [ids.setdefault(w, FIRST_ID + len(ids)) for w in _WORD.findall(text)]


def make_jobs(kind: str, count: int, length: int, vocab_size: int) -> list[Job]:
    """Jobs with answers of `length` tokens; each from another file, or another part of a file."""
    numbers = Numbers(vocab_size)
    makers = {"summary": _summary, "edit": _edit}
    if kind == "random":
        draw = random.Random(5)
        ids = range(FIRST_ID, vocab_size)
        return [
            Job([draw.choice(ids) for _ in range(600)], [draw.choice(ids) for _ in range(length)])
            for _ in range(count)
        ]
    return [_job(*makers[kind](i), numbers, length) for i in range(count)]


def prompt_texts(kind: str, count: int) -> list[str]:
    """The same jobs as texts, for a model that writes its own answers."""
    if kind == "random":
        return [f"Write a story about the number {i}." for i in range(count)]
    ask = {
        "summary": "Quote the most important sentences of this page, word for word:",
        "edit": "Write this file again, with `self` renamed to `this`:",
    }
    makers = {"summary": _summary, "edit": _edit}
    return [f"{ask[kind]}\n\n{makers[kind](i)[0][:2500]}" for i in range(count)]


def _job(text: str, answer: str, numbers: Numbers, length: int) -> Job:
    prompt, ids = numbers.of(text)[:1500], numbers.of(answer)
    while len(ids) < length:
        ids = ids + ids
    return Job(prompt, ids[:length])


def _summary(index: int) -> tuple[str, str]:
    pages = sorted((ROOT / "docs").glob("*.md"))
    text = pages[index % len(pages)].read_text(encoding="utf-8")
    draw = random.Random(index)
    start = draw.randrange(max(1, len(text) - 6000))
    text = text[start : start + 6000]
    sentences = [s for s in re.split(r"(?<=[.:])\s", text) if 40 < len(s) < 400]
    picked = sorted(draw.sample(range(len(sentences)), min(12, len(sentences))))
    quoted = (f" {draw.choice(_OWN_WORDS)}: {sentences[i]}" for i in picked)
    return text, "".join(quoted)


def _edit(index: int) -> tuple[str, str]:
    files: Sequence[Path] = sorted((ROOT / "tiercel" / "engine").glob("*.py"))
    files = [path for path in files if path.stat().st_size > 3000]
    text = files[index % len(files)].read_text(encoding="utf-8")[:6000]
    return text, re.sub(r"\bself\b", "this", text)
