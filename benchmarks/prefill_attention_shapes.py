"""Steps that the benchmark of multi-item attention measures, with the times of peers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from benchmarks.prefill_attention_peers import BEST_US, ITEM_LENS


@dataclass(frozen=True)
class Shape:
    """Requests of `cached` keys, a prefix of `prefix`, then `items` of `item_len` tokens."""

    cached: int
    prefix: int
    items: int = 0
    item_len: int = 0
    window: int = 0
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    batch: int = 1

    @property
    def name(self) -> str:
        head = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        if self.items:
            times = f"{self.batch} x " if self.batch > 1 else ""
            kind = "" if self.cached else " computed"
            return f"{times}{self.items} items of {self.item_len} on {self.prefix}{kind} {head}"
        kind = f"{self.tokens} on {self.cached}" if self.cached else f"causal {self.tokens}"
        return f"{kind} {head}" + (f" window {self.window}" if self.window else "")

    @property
    def length(self) -> int:
        return self.prefix + self.items * self.item_len

    @property
    def tokens(self) -> int:
        return self.length - self.cached

    @property
    def flops(self) -> int:
        """Of visible pairs, two products of head_dim multiply-adds each."""
        rows = range(self.cached + 1, self.prefix + 1)
        pairs = sum(min(row, self.window) if self.window else row for row in rows)
        pairs += self.items * (
            self.item_len * self.prefix + self.item_len * (self.item_len + 1) // 2
        )
        return 4 * self.heads * self.head_dim * pairs * self.batch

    @property
    def peer_us(self) -> float | None:
        """The best peer's time, where it was measured."""
        known = BEST_US.get((self.prefix, self.items), {}).get(self.batch)
        is_alike = self.cached == self.prefix and (self.heads, self.head_dim) == (32, 128)
        if known is None or not is_alike or self.item_len not in ITEM_LENS:
            return None
        return known[ITEM_LENS.index(self.item_len)]

    @property
    def num_bytes(self) -> int:
        """Queries and result, keys and values once; 16 bits."""
        width = self.tokens * self.heads + self.length * self.kv_heads
        return 4 * self.head_dim * width * self.batch


SHAPES = {
    "cuda": [
        *[Shape(0, length) for length in (1024, 2048, 4096, 8192)],
        *[Shape(cached, cached + 2048) for cached in (4096, 16384)],
        *[Shape(0, length, heads=9, kv_heads=3, head_dim=64) for length in (2048, 8192)],
        Shape(4096, 6144, heads=9, kv_heads=3, head_dim=64),
        Shape(0, 8192, window=512, heads=8, kv_heads=4, head_dim=256),
        *[Shape(prefix, prefix, 128, 32) for prefix in (512, 2048, 8192)],
    ],
    "cpu": [
        Shape(0, 256, heads=9, kv_heads=3, head_dim=64),
        Shape(256, 512, heads=9, kv_heads=3, head_dim=64),
        Shape(256, 256, 8, 16, heads=9, kv_heads=3, head_dim=64),
    ],
}
# The shapes of the published peers, and those of the study of this kernel.
_PEER_SHAPES = [
    Shape(prefix, prefix, items, length, batch=batch)
    for batch in (1, 4)
    for prefix, items in BEST_US
    for length in ITEM_LENS
]
SCORING_SHAPES = [
    *_PEER_SHAPES[: len(_PEER_SHAPES) // 2],
    *[
        Shape(prefix, prefix, items, 16)
        for prefix in (2048, 8192)
        for items in (1, 2, 4, 8, 16, 32)
    ],
    *[Shape(0, prefix, 128, length) for prefix in (512, 2048, 8192) for length in ITEM_LENS],
    *_PEER_SHAPES[len(_PEER_SHAPES) // 2 :],
]
# Triton's rows, keys, warps, stages, per head_dim.
SWEEP_SHAPES = [
    Shape(0, 4096, heads=9, kv_heads=3, head_dim=64),
    Shape(0, 4096),
    Shape(2048, 2048, 128, 32),
    Shape(0, 4096, heads=8, kv_heads=4, head_dim=256),
    Shape(0, 8192, window=512, heads=8, kv_heads=4, head_dim=256),
]
SWEEP = [
    *itertools.product((64, 128), (32, 64), (4, 8), (2, 3)),
    (128, 128, 8, 2),
    (128, 64, 4, 4),
    (64, 64, 4, 4),
]
