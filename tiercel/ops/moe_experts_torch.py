"""Routed experts with PyTorch operators on any device, with no host sync.

The pairs (token, slot) are sorted by expert and cut into tiles of `tile_rows` rows, each of one
expert: at most pairs / tile_rows + experts tiles, and at most one per pair, whatever the routing. A
tile that is not full ends in rows of zeros, and a tile that no expert needs has rows of zeros
alone. The weights of a few tiles' experts are decoded at a time, so memory is bounded and a decode
step reads the experts in use alone.
"""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.ops.block_quantize_torch import round_fp8
from tiercel.ops.dequantize import dequantize
from tiercel.quant import QuantTensor
from tiercel.quant_tiles import untile_stack
from tiercel.quant_types import Layout

# Decoded weights of a group of tiles, in bytes; at least one tile is decoded.
WORKSPACE_BYTES = 1 << 30
_BYTES_PER_WEIGHT = 16  # float32, and the temporaries of decoding
# (pairs at most, rows of a tile). Estimates, not measured: with one row a decode step of one token
# has no padding, and with 64 the products take as long as the decoding of a tile's weights.
_TILE_ROWS = ((16, 1), (2048, 16))
_MOST_ROWS = 64


def select_tiles(num_pairs: int, num_experts: int) -> tuple[int, int]:
    """Rows of a tile, and the number of tiles that suffices for any routing. Pure."""
    rows = next((rows for limit, rows in _TILE_ROWS if num_pairs <= limit), _MOST_ROWS)
    return rows, most_tiles(num_pairs, num_experts, rows)


def most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """The number of tiles that suffices for any routing. Pure."""
    return min(num_pairs, num_pairs // rows + num_experts)


class Tiles(Struct, frozen=True):
    """Pairs in tiles.

    Attributes:
        experts: (tiles,) int64, the expert of each tile; any expert for an unused tile.
        pairs: (tiles, rows) int64, the pair token * topk + slot of each row; the number of pairs
            for a row of padding.
    """

    experts: Tensor
    pairs: Tensor


def make_tiles(ids: Tensor, num_experts: int, rows: int, num_tiles: int) -> Tiles:
    """Sort the pairs of (T, topk) ids by expert and cut them into tiles; ids of -1 are left out."""
    num_pairs = ids.numel()
    keys = ids.flatten()
    sorted_ids, order = torch.sort(keys.where(keys >= 0, num_experts), stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, sorted_ids, torch.ones_like(sorted_ids))
    tiles = (counts + rows - 1) // rows
    last_tile = tiles.cumsum(0)
    first_pair = counts.cumsum(0) - counts
    index = torch.arange(num_pairs, device=ids.device)
    place = (last_tile - tiles)[sorted_ids] * rows + index - first_pair[sorted_ids]
    # Those left out come last, all at one place after the tiles.
    place = place.where(sorted_ids < num_experts, num_tiles * rows)
    pairs = torch.full((num_tiles * rows + 1,), num_pairs, dtype=torch.int64, device=ids.device)
    pairs.scatter_(0, place, order)
    numbers = torch.arange(num_tiles, device=ids.device)
    last_tile = last_tile[:num_experts]
    experts = torch.searchsorted(last_tile, numbers, right=True).clamp(max=num_experts - 1)
    return Tiles(experts, pairs[:-1].view(num_tiles, rows))


def decoded(weight: Tensor | QuantTensor, experts: Tensor) -> Tensor:
    """The matrices of some experts, (n, out, in) float32."""
    if isinstance(weight, QuantTensor):
        taken = weight.take(experts)
        return dequantize(
            untile_stack(taken) if taken.layout is Layout.TILES else taken, torch.float32
        )
    return weight.index_select(0, experts).float()


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """SwiGLU silu(min(gate, limit)) * clamp(up, -limit, limit), float32."""
    gate, up = gate.float(), up.float()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.nn.functional.silu(gate) * up


class Experts(Struct, frozen=True):
    """Stacks of weights: w1 and w3 (experts, inter, hidden), w2 (experts, hidden, inter).

    Attributes:
        w1: gate.
        w3: up.
        w2: down.
        tickets: counters of the kernel for layout TILES, of stacks in it; int32 zeros between
            launches.
    """

    w1: Tensor | QuantTensor
    w3: Tensor | QuantTensor
    w2: Tensor | QuantTensor
    tickets: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """Experts of each stack."""
        return self.w1.shape[0]


def run_experts(
    x: Tensor,
    tiles: Tiles,
    weights: Tensor,
    experts: Experts,
    limit: float | None,
    rounds_activations: bool,
) -> Tensor:
    """The weighted output of each pair, (pairs, hidden) float32, for x (T, hidden) float32."""
    num_tokens, hidden = x.shape
    num_pairs, inter = weights.numel(), experts.w1.shape[1]
    zeros = x.new_zeros(1, hidden)
    rows = torch.cat((round_fp8(x, 128) if rounds_activations else x, zeros))
    factors = torch.cat((weights.flatten().float(), zeros[0, :1]))
    out = x.new_zeros(num_pairs + 1, hidden)  # the last row takes the padding
    step = max(1, WORKSPACE_BYTES // (_BYTES_PER_WEIGHT * hidden * inter))
    topk = num_pairs // num_tokens
    for start in range(0, tiles.experts.shape[0], step):
        chosen = tiles.experts[start : start + step]
        pairs = tiles.pairs[start : start + step]
        tokens = rows[pairs // topk]  # padding is pair T * topk: the row of zeros
        gate = torch.bmm(tokens, decoded(experts.w1, chosen).transpose(1, 2))
        up = torch.bmm(tokens, decoded(experts.w3, chosen).transpose(1, 2))
        h = swiglu(gate, up, limit) * factors[pairs].unsqueeze(-1)
        h = round_fp8(h, 128) if rounds_activations else h
        y = torch.bmm(h, decoded(experts.w2, chosen).transpose(1, 2))
        out.index_copy_(0, pairs.flatten(), y.flatten(0, 1))
    return out[:num_pairs]


def sum_slots(pairs: Tensor, topk: int) -> Tensor:
    """Sum a token's slots in their order, (T * topk, hidden) to (T, hidden)."""
    slots = pairs.view(-1, topk, pairs.shape[1])
    total = slots[:, 0]
    for slot in range(1, topk):
        total = total + slots[:, slot]
    return total
