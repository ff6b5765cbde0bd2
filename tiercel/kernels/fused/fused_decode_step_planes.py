"""Bytes of a file's blocks to the planes of the kernel of a whole decode step, and back.

A plane holds what a lane of a warp reads of its 128 weights, or two lanes of a block of 256:
`fused_decode_step_stream.py` lists them for each type and puts them in order. All functions are
exact inverses of each other. `quant_types.py` says where the blocks are described.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.quant_types import QuantType

_LANE_BLOCKS = 4  # blocks of 32 weights of a lane


def split_planes(qtype: str, data: Tensor) -> list[Tensor]:
    """Planes of a matrix, uint8 in the order of the file's weights.

    Args:
        qtype: of the matrix.
        data: (rows, row bytes) uint8.
    """
    kind = QuantType[qtype]
    if kind.block_weights == 32:
        return _split_32(qtype, data.reshape(-1, _LANE_BLOCKS, kind.block_bytes))
    blocks = data.reshape(-1, kind.block_bytes)
    if qtype == "IQ4_XS":
        return [_sort_nibbles(blocks[:, 8:].unflatten(1, (-1, 16))), blocks[:, :8]]
    if qtype == "Q4_K":
        return [blocks[:, 16:], blocks[:, :16]]
    if qtype == "Q5_K":
        return [blocks[:, 48:], blocks[:, :16], _turn_bits(blocks[:, 16:48])]
    return [blocks[:, :128], blocks[:, 192:208], blocks[:, 128:192], blocks[:, 208:]]


def join_planes(qtype: str, planes: Sequence[Tensor]) -> Tensor:
    """The inverse of `split_planes`, (blocks, block bytes); planes may have any shape."""
    kind = QuantType[qtype]
    if kind.block_weights == 32:
        return _join_32(qtype, planes).flatten(0, 1)
    widths = {
        "IQ4_XS": (128, 8),
        "Q4_K": (128, 16),
        "Q5_K": (128, 16, 32),
        "Q6_K": (128, 16, 64, 2),
    }
    parts = [part.view(-1, width) for part, width in zip(planes, widths[qtype], strict=True)]
    if qtype == "IQ4_XS":
        codes, header = parts
        return torch.cat((header, _file_nibbles(codes.unflatten(1, (-1, 16))).flatten(1)), dim=1)
    if qtype == "Q4_K":
        return torch.cat((parts[1], parts[0]), dim=1)
    if qtype == "Q5_K":
        return torch.cat((parts[1], _turn_bits(parts[2]), parts[0]), dim=1)
    codes, scales, high, d = parts
    return torch.cat((codes, high, scales, d), dim=1)


def _split_32(qtype: str, lanes: Tensor) -> list[Tensor]:
    """Of (lanes, 4, block bytes)."""
    d = lanes[..., :2]
    if qtype == "Q8_0":
        halves = (slice(0, 2), slice(2, 4))
        return [part for half in halves for part in (lanes[:, half, 2:], d[:, half])]
    codes = lanes[..., -16:]
    if qtype == "IQ4_NL":
        codes = _sort_nibbles(codes)
    return [codes, d, _gather_bits(lanes[..., 2:6])] if qtype == "Q5_0" else [codes, d]


def _join_32(qtype: str, planes: Sequence[Tensor]) -> Tensor:
    """(lanes, 4, block bytes)."""
    if qtype == "Q8_0":
        codes = torch.cat([part.view(-1, 2, 32) for part in planes[::2]], dim=1)
        return torch.cat((torch.cat([d.view(-1, 2, 2) for d in planes[1::2]], dim=1), codes), dim=2)
    codes, d = planes[0].view(-1, 4, 16), planes[1].view(-1, 4, 2)
    if qtype == "IQ4_NL":
        codes = _file_nibbles(codes)
    high = [_spread_bits(planes[2].view(-1, 16))] if qtype == "Q5_0" else []
    return torch.cat((d, *high, codes), dim=2)


def _turn_bits(bits: Tensor) -> Tensor:
    """Bytes i and i + 16 of 32 to bytes i of their low and of their high nibbles, or back."""
    low, high = bits[..., :16], bits[..., 16:]
    turned: Tensor = torch.cat((low & 15 | high << 4, low >> 4 | high & 240), dim=-1)
    return turned


def _gather_bits(bits: Tensor) -> Tensor:
    """(lanes, 4, 4), a bit a weight, to (lanes, 16): byte i has weights i and i + 16 of groups."""
    single = bits[..., None] >> _eight(bits) & 1  # (lanes, group, byte, bit)
    by_weight = single.flatten(2).unflatten(2, (2, 16)).permute(0, 3, 2, 1).flatten(2)
    gathered: Tensor = (by_weight << _eight(bits)).sum(dim=2, dtype=torch.uint8)
    return gathered


def _spread_bits(bits: Tensor) -> Tensor:
    """The inverse of `_gather_bits`."""
    by_weight = bits[..., None] >> _eight(bits) & 1  # (lanes, 16, 8)
    single = by_weight.unflatten(2, (2, 4)).permute(0, 3, 2, 1).flatten(2).unflatten(2, (4, 8))
    spread: Tensor = (single << _eight(bits)).sum(dim=3, dtype=torch.uint8)
    return spread


def _eight(like: Tensor) -> Tensor:
    """The bits of a byte."""
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def _sort_nibbles(codes: Tensor) -> Tensor:
    """(..., 16), byte i with weights i and i + 16, to byte i with weights 2 i and 2 i + 1."""
    weights = torch.cat((codes & 15, codes >> 4), dim=-1).unflatten(-1, (16, 2))
    sorted_codes: Tensor = weights[..., 0] | weights[..., 1] << 4
    return sorted_codes


def _file_nibbles(codes: Tensor) -> Tensor:
    """The inverse of `_sort_nibbles`."""
    weights = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    in_file: Tensor = weights[..., :16] | weights[..., 16:] << 4
    return in_file
