"""Repacking of quantised weights between the layout of the file and the planes of GPU kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiercel.errors import ArgumentError
from tiercel.kernels.packed.packed_repack import Field, gather_rows, pack_plane, unpack_plane
from tiercel.quant import QuantTensor
from tiercel.quant_types import PLANES, TILE_ROWS, Layout, Plane, QuantType


def packed_repack(weight: QuantTensor, layout: Layout) -> QuantTensor:
    """Bring a matrix from one layout to another; every byte is kept.

    Args:
        weight: of a type in `quant.PLANES`, on any device; in layout FILE rows may be strided.
        layout: of the result, FILE or SOA.

    Returns:
        The same weights in planes of their own; `weight` itself if it has the layout already.

    Raises:
        ArgumentError: the type or the layout has no planes, or a plane does not fit the shape.
    """
    if weight.layout is layout:
        return weight
    if weight.layout is Layout.STEP:
        return packed_repack(_from_step(weight), layout)
    qtype, shape = weight.qtype, weight.shape
    if qtype not in PLANES or not {weight.layout, layout} <= {Layout.FILE, Layout.SOA}:
        raise ArgumentError(
            f"packed_repack: {qtype.name} from {weight.layout.name} to {layout.name}.",
            hint=f"Types with planes: {', '.join(known.name for known in PLANES)}.",
        )
    _check(weight)
    rows, num_blocks = shape[0], shape[1] // qtype.block_weights
    if layout is Layout.SOA:
        blocks = weight.planes["data"].unflatten(1, (num_blocks, qtype.block_bytes))
        planes = {plane.name: pack_plane(blocks, _field(plane, qtype)) for plane in PLANES[qtype]}
        return QuantTensor(qtype, layout, shape, planes)
    first = weight.planes[PLANES[qtype][0].name]
    data = torch.empty(
        (rows, num_blocks, qtype.block_bytes), dtype=torch.uint8, device=first.device
    )
    for plane in PLANES[qtype]:
        unpack_plane(weight.planes[plane.name], _field(plane, qtype), data)
    return QuantTensor(qtype, layout, shape, {"data": data.flatten(1)})


def join_step(parts: Sequence[QuantTensor]) -> QuantTensor:
    """Rows of matrices of one type in layout STEP, end to end; their slices are the same."""
    if len(parts) == 1:
        return parts[0]
    table = torch.cat([part.planes["table"] for part in parts], dim=1)
    shape = (table.shape[1], parts[0].shape[1])
    return QuantTensor(
        parts[0].qtype, Layout.STEP, shape, {"weights": parts[0].planes["weights"], "table": table}
    )


# Of a block, as layout STEP keeps them apart: codes, header or scales, qh, d.
_STEP_FIELDS = {
    QuantType.Q4_K: ((16, 128), (0, 16)),
    QuantType.Q6_K: ((0, 128), (192, 16), (128, 64), (208, 2)),
}


def _from_step(weight: QuantTensor) -> QuantTensor:
    """A matrix of layout STEP in layout FILE."""
    blocks = weight.shape[1] // weight.qtype.block_weights
    planes, fields = weight.planes, _STEP_FIELDS[weight.qtype]
    data = gather_rows(planes["weights"], planes["table"], blocks, fields)
    return QuantTensor(weight.qtype, Layout.FILE, weight.shape, {"data": data.flatten(1)})


def _field(plane: Plane, qtype: QuantType) -> Field:
    places = (plane.outer, plane.pieces, plane.inner)
    return Field(plane.start, plane.size, *places, plane.is_woven, qtype.group_blocks)


def _check(weight: QuantTensor) -> None:
    """Compare all planes with the shape.

    Raises:
        ArgumentError: one does not fit.
    """
    rows, in_features = weight.shape
    qtype = weight.qtype
    groups, tiles = qtype.num_groups(in_features), -(-rows // TILE_ROWS)
    if weight.layout is Layout.FILE:
        expected: dict[str, tuple[int, ...]] = {"data": (rows, qtype.row_bytes(in_features))}
    else:
        tile_blocks = TILE_ROWS * qtype.group_blocks
        expected = {
            plane.name: (tiles, groups, tile_blocks * plane.size) for plane in PLANES[qtype]
        }
    found = {name: tuple(plane.shape) for name, plane in weight.planes.items()}
    is_bytes = all(plane.dtype == torch.uint8 for plane in weight.planes.values())
    if in_features % qtype.block_weights or found != expected or not is_bytes:
        raise ArgumentError(
            f"packed_repack: planes {found} do not hold {qtype.name} of shape {weight.shape} in "
            f"layout {weight.layout.name}.",
            hint=f"Needed: {expected} torch.uint8, in rows of whole blocks.",
        )
