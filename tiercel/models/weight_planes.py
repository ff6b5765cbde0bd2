"""Planes of weights from the bytes of a file: their sizes, what may not be in them, MXFP4 of GGUF.

A plane of a weight is (matrices, rows, row_bytes) uint8 here: 1 matrix, or the experts of a stack.
A GGUF block of MXFP4 becomes the two planes that safetensors files have:

    17 bytes of the file   E8M0 scale; 16 bytes: elements 0..15 in bits 0..3, 16..31 in bits 4..7
    plane `scale`          that byte
    plane `q`              16 bytes: elements 2j in bits 0..3 of byte j, 2j + 1 in bits 4..7

Free of PyTorch.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tiercel.errors import ModelFormatError
from tiercel.loader.mapped import TensorInfo, shown
from tiercel.models.stored import StoredWeight
from tiercel.quant_types import FP4_GROUPS, QuantType

_MXFP4_BYTES: Final = 17
# Rows of one expert that are rearranged at once take about this, beside their result.
_PIECE_BYTES: Final = 1 << 20
FACTORS: Final = ("global_scale", "divisor")  # planes of one number a matrix

Bytes = npt.NDArray[np.uint8]


def plane_unit(weight: StoredWeight, plane: str, qtype: QuantType) -> tuple[int, int, int]:
    """What an element of a plane is for, and takes.

    Args:
        weight: that has the plane.
        plane: its name.
        qtype: of the file's tensors that hold it.

    Returns:
        Rows and columns of weights, and bytes.
    """
    if plane == "data":
        return 1, qtype.block_weights, qtype.block_bytes
    if weight.qtype is QuantType.FP8_BLOCK:
        return (*weight.block, qtype.block_bytes) if plane == "scale" else (1, 1, 1)
    return 1, FP4_GROUPS[weight.qtype] if plane == "scale" else 2, 1


def plane_size(weight: StoredWeight, plane: str, qtype: QuantType) -> tuple[int, int, int]:
    """(matrices, rows, row_bytes) of a plane, which is all of the weight."""
    shape = weight.shape if len(weight.shape) > 1 else (1, *weight.shape)
    matrices = shape[0] if len(shape) == 3 else 1
    if plane in FACTORS:
        return matrices, 1, 4
    rows, columns, size = plane_unit(weight, plane, qtype)
    return matrices, -(-shape[-2] // rows), -(-shape[-1] // columns) * size


def cut(data: Bytes, weight: StoredWeight, plane: str, qtype: QuantType) -> Bytes:
    """The part of a tensor's bytes that is of this weight.

    Args:
        data: (matrices, rows, row_bytes), all of a tensor.
        weight: whose `experts`, `rows` and `cols` say which part.
        plane: that the tensor holds.
        qtype: of the tensor.
    """
    if weight.experts is not None:
        data = data[slice(*weight.experts)]
    if plane in FACTORS or (weight.rows is None and weight.cols is None):
        return data
    rows, columns, size = plane_unit(weight, plane, qtype)
    if plane == "scale" and weight.file_block is not None:
        return _repeat_scales(data, weight, size)
    if weight.rows is not None:
        start, stop = weight.rows
        data = data[:, start // rows : -(-stop // rows)]
    if weight.cols is not None:
        start, stop = weight.cols
        data = data[:, :, start // columns * size : -(-stop // columns) * size]
    return data


def _repeat_scales(data: Bytes, weight: StoredWeight, size: int) -> Bytes:
    """Scales of the small blocks of a part: each is that of the block of the file it is in.

    Args:
        data: (matrices, rows, row_bytes) scales of the file.
        weight: the part.
        size: bytes of a scale.
    """
    assert weight.file_block is not None
    indices = []
    for axis, bounds in ((0, weight.rows), (1, weight.cols)):
        first = 0 if bounds is None else bounds[0]
        count = -(-weight.shape[axis - 2] // weight.block[axis])
        indices.append((first + np.arange(count) * weight.block[axis]) // weight.file_block[axis])
    scales = data.reshape(*data.shape[:2], -1, size)
    repeated = scales[:, indices[0]][:, :, indices[1]]
    return repeated.reshape(len(data), len(indices[0]), -1)


def check_scales(data: Bytes, info: TensorInfo, plane: str, file: str) -> None:
    """Refuse scales that are no numbers.

    Args:
        data: (rows, row_bytes), of one matrix.
        info: the tensor that they are of; MXFP4: the whole blocks.
        plane: ``scale``, ``global_scale`` or ``divisor``; others have nothing to check.
        file: its name, for errors.

    Raises:
        ModelFormatError: NaN, infinity, or a divisor of 0; names the tensor and the row.
    """
    if info.qtype is QuantType.MXFP4:
        is_bad, what = (
            data.reshape(len(data), -1, _MXFP4_BYTES)[:, :, 0] == 255,
            "the E8M0 byte 255",
        )
    elif plane not in ("scale", *FACTORS):
        return
    elif info.qtype is QuantType.F32:
        values = np.ascontiguousarray(data).view("<f4")
        is_bad, what = ~np.isfinite(values), "NaN or infinity"
        if plane == "divisor" and not values.all():
            is_bad, what = values == 0, "0, which divides"
    elif info.qtype is QuantType.F8_E4M3:
        is_bad, what = (data & 0x7F) == 0x7F, "NaN"
    else:
        is_bad, what = data == 255, "the E8M0 byte 255, which is NaN"
    rows = is_bad.any(axis=1)
    if rows.any():
        raise ModelFormatError(
            f"{file}: tensor {shown(info.name)} holds {what}, first in row {int(rows.argmax())}.",
            hint="A scale must be a number: fetch or convert the model again.",
        )


def unpack_mxfp4(blocks: Bytes, q: Bytes, scale: Bytes) -> None:
    """Write the planes of a matrix of GGUF's MXFP4.

    Args:
        blocks: (rows, in / 32 * 17).
        q: (rows, in / 2), for the result.
        scale: (rows, in / 32), for the result.
    """
    step = max(1, _PIECE_BYTES // blocks.shape[1])
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        fields = part.reshape(len(part), -1, _MXFP4_BYTES)
        scale[start : start + step] = fields[:, :, 0]
        values = fields[:, :, 1:]
        halves = q[start : start + step].reshape(len(part), -1, 2, 8)
        for half, nibbles in enumerate((values & 15, values >> 4)):
            halves[:, :, half] = nibbles[:, :, 0::2] | nibbles[:, :, 1::2] << 4


def check_table(table: npt.NDArray[np.integer], limit: int, name: str, file: str) -> None:
    """Refuse a table of experts by token id that no step can use.

    Args:
        table: (vocab_size, experts per token).
        limit: experts.
        name: the file's, of the tensor.
        file: its name, for errors.

    Raises:
        ModelFormatError: an expert that does not exist, or one that is twice in a row.
    """
    is_outside = ((table < 0) | (table >= limit)).any(axis=1)
    if is_outside.any():
        row = int(is_outside.argmax())
        raise ModelFormatError(
            f"{file}: tensor {shown(name)} has experts {shown(table[row].tolist())} in row {row}.",
            hint=f"They must be 0 to {limit - 1}.",
        )
    ordered = np.sort(table, axis=1)
    is_repeated = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if is_repeated.any():
        row = int(is_repeated.argmax())
        raise ModelFormatError(
            f"{file}: tensor {shown(name)} has experts {shown(table[row].tolist())} in row {row}.",
            hint="Each expert of a row must be another one.",
        )
