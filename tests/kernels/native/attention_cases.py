"""Steps of attention for the native library: paged caches, NaN in all that must not be read."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.kernels.native import abi
from tiercel.kernels.native.library import load_variant, make_pool

CACHE_TYPES = {torch.float32: abi.FLOAT32, torch.float16: abi.FLOAT16, torch.bfloat16: abi.BFLOAT16}
MAX_POSITIONS = 5000


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer."""

    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    half: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float16
    has_norm: bool = False
    window: int = 0

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)


@dataclass(frozen=True)
class Part:
    """A request of a step: tokens `start` .. `start + count` of a sequence, then items.

    Attributes:
        rows: (start + count, heads + 2 * kv_heads, head_dim) before norm and rotation.
        start: tokens that the cache holds already.
        items: rows of each item.
        alone: tokens that see the prefix alone, before the items.
        is_padding: whether its tokens have no slots.
    """

    rows: Tensor
    start: int
    items: tuple[Tensor, ...] = ()
    alone: Tensor | None = None


@dataclass
class Step:
    """Tensors of one call.

    Attributes:
        item_start: (T,); context_lens: lengths with items.
    """

    shape: Shape
    heads: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    rows: Tensor
    starts: Tensor
    seq_lens: Tensor
    positions: Tensor
    slots: Tensor
    prefix_len: Tensor | None
    item_start: Tensor | None
    context_lens: list[int]
    rope: Tensor
    angles: Tensor
    norms: tuple[Tensor, Tensor] | None


def make_rows(shape: Shape, tokens: int, seed: int) -> Tensor:
    """Rows of a projection."""
    generator = torch.Generator().manual_seed(seed)
    heads = shape.num_heads + 2 * shape.num_kv_heads
    return torch.randn(tokens, heads, shape.head_dim, generator=generator)


def _angles(shape: Shape) -> Tensor:
    frequencies = 10000.0 ** -(torch.arange(shape.half, dtype=torch.float64) / max(shape.half, 1))
    return torch.arange(MAX_POSITIONS, dtype=torch.float64).outer(frequencies)


def make_norms(shape: Shape) -> tuple[Tensor, Tensor] | None:
    """Weights of the norms of queries and keys."""
    if not shape.has_norm:
        return None
    generator = torch.Generator().manual_seed(77)
    q, k = 1 + 0.3 * torch.randn(2, shape.head_dim, generator=generator)
    return q.contiguous(), k.contiguous()


def make_step(shape: Shape, parts: Sequence[Part], seed: int = 0) -> Step:
    """Lay out a step. What the cache holds already is NaN until `fill_cache`."""
    generator = torch.Generator().manual_seed(seed)
    size, num_reqs = shape.block_size, len(parts)
    blocks = [-(-len(part.rows) // size) for part in parts]
    num_blocks = sum(blocks) + 3
    order = torch.randperm(num_blocks - 1, generator=generator) + 1  # 0 is the null block
    num_rows = num_reqs + 2
    rows = torch.randperm(num_rows, generator=generator)[:num_reqs].int()
    tables = torch.full((num_rows, max(blocks) + 2), int(order[-1]), dtype=torch.int32)
    cache_shape = (num_blocks, size, shape.num_kv_heads, shape.head_dim)
    heads, positions, slots, item_starts, starts, contexts = [], [], [], [], [0], []
    at = 0
    for request, part in enumerate(parts):
        table = order[at : at + blocks[request]]
        at += blocks[request]
        tables[rows[request], : len(table)] = table.int()
        prefix = len(part.rows)
        index = torch.arange(part.start, prefix)
        heads.append(part.rows[part.start :])
        positions.append(index)
        slots.append(table[index // size] * size + index % size)
        item_starts.append(torch.zeros(len(index), dtype=torch.int64))
        length = prefix
        alone = () if part.alone is None else tuple(part.alone.unsqueeze(1))
        for number, item in enumerate((*alone, *part.items)):
            heads.append(item)
            positions.append(prefix + torch.arange(len(item)))
            slots.append(torch.full((len(item),), -1))
            item_starts.append(torch.full((len(item),), length + (number < len(alone))))
            length += len(item)
        contexts.append(length)
        starts.append(starts[-1] + length - part.start)
    has_items = any(part.items or part.alone is not None for part in parts)
    angles = _angles(shape)
    return Step(
        shape=shape,
        heads=torch.cat(heads).contiguous(),
        k_cache=torch.full(cache_shape, torch.nan, dtype=shape.dtype),
        v_cache=torch.full(cache_shape, torch.nan, dtype=shape.dtype),
        tables=tables,
        rows=rows,
        starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([len(part.rows) for part in parts], dtype=torch.int32),
        positions=torch.cat(positions).int(),
        slots=torch.cat(slots),
        prefix_len=torch.tensor([len(p.rows) for p in parts]).int() if has_items else None,
        item_start=torch.cat(item_starts).int() if has_items else None,
        context_lens=contexts,
        rope=torch.stack((angles.cos(), angles.sin()), dim=1).float().contiguous(),
        angles=angles,
        norms=make_norms(shape),
    )


def fill_cache(step: Step, parts: Sequence[Part], cached: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write keys and values, (tokens, kv_heads, head_dim), of the tokens before each part."""
    for request, part in enumerate(parts):
        index = torch.arange(part.start)
        table = step.tables[step.rows[request]].long()
        size = step.shape.block_size
        slots = table[index // size] * size + index % size
        for cache, values in zip((step.k_cache, step.v_cache), cached[request], strict=True):
            cache.flatten(0, 1)[slots] = values[: part.start].to(cache.dtype)


def read_cache(step: Step, request: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a request, (tokens, kv_heads, head_dim) each."""
    index = torch.arange(int(step.seq_lens[request]))
    table = step.tables[step.rows[request]].long()
    size = step.shape.block_size
    slots = table[index // size] * size + index % size
    return step.k_cache.flatten(0, 1)[slots], step.v_cache.flatten(0, 1)[slots]


def run_step(step: Step, variant: str, num_threads: int = 2) -> Tensor:
    """Attention of the step; its heads and caches change. Returns (T, num_heads, head_dim)."""
    lib, shape = load_variant(variant).lib, step.shape
    count = len(step.heads)
    out = torch.full((count, shape.num_heads, shape.head_dim), torch.nan)

    def pointer(tensor: Tensor | None) -> int | None:
        assert tensor is None or tensor.is_contiguous()
        return None if tensor is None else tensor.data_ptr()

    q_norm, k_norm = step.norms or (None, None)
    a = abi.Attention(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        half=shape.half,
        window=shape.window,
        scale=shape.scale,
        eps=1e-5,
        q_norm=pointer(q_norm),
        k_norm=pointer(k_norm),
        rope=pointer(step.rope),
        k_cache=pointer(step.k_cache),
        v_cache=pointer(step.v_cache),
        cache_type=CACHE_TYPES[shape.dtype],
        block_size=shape.block_size,
        num_reqs=len(step.rows),
        num_tokens=count,
        tables=pointer(step.tables),
        max_blocks=step.tables.shape[1],
        rows=pointer(step.rows),
        starts=pointer(step.starts),
        seq_lens=pointer(step.seq_lens),
        positions=pointer(step.positions),
        slots=pointer(step.slots),
        prefix_len=pointer(step.prefix_len),
        item_start=pointer(step.item_start),
        heads=pointer(step.heads),
        out=pointer(out),
    )
    floats = lib.tc_attention_scratch(ctypes.byref(a), num_threads)
    guard = 64
    scratch = torch.full((floats + guard,), torch.nan)
    a.scratch = scratch.data_ptr()
    lib.tc_attention_run(make_pool(num_threads, load_variant(variant)).handle, ctypes.byref(a))
    assert scratch[floats:].isnan().all(), "a write after the scratch's end"
    return out
