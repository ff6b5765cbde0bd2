"""The weights of all layers in the order in which the kernel of a whole decode step reads them.

CTA c of 128 owns rows 32 c .. of q, o and down, 8 c .. of k and v, and of gate and up the pairs
32 c .. of each 4096: so the inputs of a slice of down come from all CTAs. Its 16 warps are 4
groups of 4; a warp takes two rows at a time, of gate and up one each. A unit is one row x 4096
columns (`fused_decode_step_units.cuh` has the order of its bytes); a slot is one unit for each warp
of a group. In memory: CTA, group, then in order of use: layer, matrix, iteration, and there

    slot of the first rows | slot of the second rows | of Q6_K: a slot of the parts C of both

of 9216, 9216 and 8448 bytes. Iterations of down are its slices of 4096 columns. k belongs to group
0, v to group 1, after q. So each producer reads one sequence of bytes from end to end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.kernels.fused.fused_decode_step_geometry import BLOCK, COLUMNS, GROUPS, MATRICES
from tiercel.kernels.fused.fused_refusal import CTAS

GROUP_WARPS = 4
LANES = 32
BLOCKS = COLUMNS // BLOCK
UNIT_BYTES, SLOT_BYTES, SLOT_C_BYTES = 2304, 9216, 8448
BLOCK_BYTES = {False: 144, True: 210}  # of 256 weights of Q4_K, of Q6_K
_QH_BYTES, _D_BYTES = 1024, 32  # of a unit's part C


def pair_bytes(*, is_q6: bool) -> int:
    """Bytes of one iteration of a group: two rows of each warp."""
    return 2 * SLOT_BYTES + (SLOT_C_BYTES if is_q6 else 0)


def layer_bytes(mask: int, slices: int, group: int) -> int:
    """Bytes of a layer in the sequence of one group of one CTA.

    Args:
        mask: bit i is set if `MATRICES[i]` is Q6_K.
        slices: of 4096 columns in a row of down.
        group: 0 to 3.
    """
    pairs = (1, int(group == 0), int(group == 1), 1, 2 * slices, slices)
    return sum(
        count * pair_bytes(is_q6=bool(mask >> i & 1)) for i, count in enumerate(pairs) if count
    )


def _split(data: Tensor) -> list[Tensor]:
    """(rows, row bytes) of a file to the parts of units, each (rows, slices, bytes)."""
    is_q6 = data.shape[1] % BLOCK_BYTES[True] == 0
    blocks = data.unflatten(1, (-1, BLOCKS, BLOCK_BYTES[is_q6]))

    def chunks(first: int, count: int) -> Tensor:  # of a lane, 16 bytes each; lanes side by side
        own = blocks[..., first : first + 32 * count].reshape(*blocks.shape[:2], LANES, count, 16)
        flat: Tensor = own.transpose(2, 3).flatten(2)
        return flat

    if not is_q6:
        return [torch.cat((chunks(16, 4), blocks[..., :16].flatten(2)), dim=2)]
    a_part = torch.cat((chunks(0, 4), blocks[..., 192:208].flatten(2)), dim=2)
    return [a_part, chunks(128, 2), blocks[..., 208:].flatten(2)]


def _join(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `_split`."""

    def blocks(part: Tensor, count: int) -> Tensor:
        own: Tensor = part.unflatten(2, (count, LANES, 16)).transpose(2, 3)
        return own.reshape(*part.shape[:2], BLOCKS, 32 * count)

    a_part = parts[0]
    first = blocks(a_part[..., :2048], 4)
    fields = a_part[..., 2048:].unflatten(2, (BLOCKS, 16))
    if len(parts) == 1:
        return torch.cat((fields, first), dim=3).flatten(1)
    d = parts[2].unflatten(2, (BLOCKS, 2))
    return torch.cat((first, blocks(parts[1], 2), fields, d), dim=3).flatten(1)


def _by_warp(name: str, part: Tensor) -> Tensor:
    """(rows, slices, bytes) to (CTA, iteration, group, warp, row of two, bytes)."""
    if name == "gate_up":  # rows gate 0, up 0, gate 1, ...
        pairs: Tensor = part.squeeze(1).unflatten(0, (-1, CTAS, 2, GROUPS, GROUP_WARPS, 2))
        return pairs.transpose(0, 1).flatten(1, 2)
    groups = 1 if name in ("k", "v") else GROUPS
    rows: Tensor = part.unflatten(0, (CTAS, groups, GROUP_WARPS, 2))
    return rows.movedim(4, 1)


def _by_row(name: str, part: Tensor) -> Tensor:
    """The inverse of `_by_warp`."""
    if name == "gate_up":
        pairs: Tensor = part.unflatten(1, (-1, 2))
        return pairs.transpose(0, 1).flatten(0, 5).unsqueeze(1)
    return part.movedim(1, 4).flatten(0, 3)


def pack_matrix(name: str, data: Tensor) -> Tensor:
    """Order one matrix.

    Args:
        name: of `MATRICES`; gate_up has rows gate 0, up 0, gate 1, ...
        data: (rows, row bytes) uint8 as in a file; Q4_K or Q6_K, told apart by their length.

    Returns:
        (CTAS, iterations, groups, bytes of a pair) uint8.
    """
    parts = [_by_warp(name, part) for part in _split(data)]
    slots = parts[0].transpose(3, 4).flatten(3)
    if len(parts) == 1:
        return slots
    c_part = torch.cat((parts[1].flatten(4), parts[2].flatten(4)), dim=4).flatten(3)
    return torch.cat((slots, c_part), dim=3)


def unpack_matrix(name: str, packed: Tensor) -> Tensor:
    """The inverse of `pack_matrix`."""
    slots = packed[..., : 2 * SLOT_BYTES].unflatten(3, (2, GROUP_WARPS, UNIT_BYTES))
    parts = [_by_row(name, slots.transpose(3, 4))]
    if packed.shape[3] > 2 * SLOT_BYTES:
        c_part = packed[..., 2 * SLOT_BYTES :].unflatten(3, (GROUP_WARPS, -1))
        qh, d = c_part.split((2 * _QH_BYTES, 2 * _D_BYTES), dim=4)
        parts += [_by_row(name, part.unflatten(4, (2, -1))) for part in (qh, d)]
    return _join(parts)


def stream_layout(masks: Sequence[int], slices: int) -> tuple[int, tuple[int, ...]]:
    """Bytes of a CTA's weights of all layers, and where each group begins among them."""
    sizes = [sum(layer_bytes(mask, slices, g) for mask in masks) for g in range(GROUPS)]
    return sum(sizes), tuple(sum(sizes[:g]) for g in range(GROUPS))


def matrix_places(
    masks: Sequence[int], slices: int, starts: Sequence[int], layer: int
) -> dict[str, list[tuple[int, int]]]:
    """Of each matrix of a layer and each of its groups: first and last byte in a CTA's row."""
    mask = masks[layer]
    at = [
        start + sum(layer_bytes(before, slices, g) for before in masks[:layer])
        for g, start in enumerate(starts)
    ]
    places: dict[str, list[tuple[int, int]]] = {}
    counts = {"gate_up": 2 * slices, "down": slices}
    for i, name in enumerate(MATRICES):
        groups = {"k": (0,), "v": (1,)}.get(name, range(GROUPS))
        size = counts.get(name, 1) * pair_bytes(is_q6=bool(mask >> i & 1))
        places[name] = []
        for group in groups:
            places[name].append((at[group], at[group] + size))
            at[group] += size
    return places


def write_matrix(stream: Tensor, places: Sequence[tuple[int, int]], packed: Tensor) -> None:
    """Put a matrix of `pack_matrix` into its places."""
    for group, (first, last) in enumerate(places):
        stream[:, first:last] = packed[:, :, group].flatten(1)


def read_matrix(stream: Tensor, places: Sequence[tuple[int, int]], *, is_q6: bool) -> Tensor:
    """The inverse of `write_matrix`."""
    rows = [stream[:, first:last] for first, last in places]
    size = pair_bytes(is_q6=is_q6)
    return torch.stack([row.unflatten(1, (-1, size)) for row in rows], dim=2)
