"""How weights rest in memory: the form that each matrix takes on a device, and its bytes.

The loader (`ops/linear.py`), the choice of a dtype, the memory check and `tiercel inspect` all use
this module, so they cannot disagree. Forms:

    dense     (out, in) in the dtype of the activations
    tiles     CPU with the native library: the blocks of the file, 8 rows end to end
    mapped    CPU with the native library: in the map of the file, as they are
    planes1   CPU without, bfloat16: one plane of 4-bit codes, a scale and a zero per 32 weights
    planes2   two such planes, for types of 5 and 8 bits
    packed    GPU, float16: the blocks of the file, rearranged; beside a dense copy if there is room
    stored    as in the file, decoded in each product: block formats, and stacks of any type

Without the native library, types that cannot rest packed on a CPU (Q6_K, whose groups of 16 the
4-bit operator does not have, Q2_K, Q3_K and the IQ4 types) rest dense: in bfloat16, which rounds a
weight as the scales of planes are rounded. Decoding such blocks in each product takes 40 times as
long as the product of bfloat16 weights (docs/notes/cpu_decode.md). Free of PyTorch; a dtype is its
name.
"""

from __future__ import annotations

import math
from typing import Final

from tiercel.kernels.native.forms import has_native, native_form, tiles_bytes
from tiercel.quant_types import PLANES, QuantType

# Types that rest as the file stores them, in layout FILE or BLOCKS.
STORED: Final = (QuantType.FP8_BLOCK, QuantType.MXFP4, QuantType.NVFP4)
# Planes of the CPU operator for each type: it has groups of 32 weights with a zero.
INT4_PLANES: Final = {
    QuantType.Q4_0: 1,
    QuantType.Q4_1: 1,
    QuantType.Q4_K: 1,
    QuantType.Q5_0: 2,
    QuantType.Q5_1: 2,
    QuantType.Q5_K: 2,
    QuantType.Q8_0: 2,
}
INT4_ROW_MULTIPLE: Final = 16  # of output features, required by the CPU operator
ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
_PLANE_GROUP_BYTES: Final = 20  # of 32 weights: 16 of codes, two bfloat16
_PLANE_GROUP: Final = 32


Q8_PLANES_COLUMNS: Final = 128  # columns of planes are a multiple of this

NATIVE_FORMS: Final = ("tiles", "mapped")


def uses_native(device_type: str) -> bool:
    """Whether matrices on a device are the native library's."""
    return device_type == "cpu" and has_native()


def select_form(qtype: QuantType, shape: tuple[int, int], dtype: str, device_type: str) -> str:
    """Choose how a matrix rests, one of the forms above.

    Args:
        qtype: how the file stores it.
        shape: (out_features, in_features).
        dtype: of the activations.
        device_type: ``cpu`` or ``cuda``.
    """
    if qtype in STORED:
        return "stored"
    if device_type == "cuda":
        return "packed" if dtype == "float16" and qtype in PLANES else "dense"
    if uses_native(device_type):
        return native_form(qtype.ggml_id, *shape) or "dense"
    packs = dtype == "bfloat16" and qtype in INT4_PLANES
    if not packs or shape[0] % INT4_ROW_MULTIPLE:
        return "dense"
    return f"planes{INT4_PLANES[qtype]}"


def keeps_q8_planes(qtype: QuantType, shape: tuple[int, ...], dtype: str, device_type: str) -> bool:
    """Whether a dense matrix of DeepSeek-V4 also rests in planes, which some tokens read.

    Args:
        qtype: how the file stores it.
        shape: (out_features, in_features).
        dtype: of the activations.
        device_type: ``cpu`` or ``cuda``.
    """
    is_read = device_type == "cuda" and dtype == "bfloat16" and qtype is QuantType.Q8_0
    return is_read and len(shape) == 2 and shape[1] % Q8_PLANES_COLUMNS == 0


def head_dtype(dtype: str, device_type: str) -> str:
    """The dtype in which the output matrix rests where it is dense.

    float16 in place of bfloat16 on a CPU: 11 significant bits, where 8 would make logits tie.
    """
    return "float16" if device_type == "cpu" and dtype == "bfloat16" else dtype


def resting_bytes(
    qtype: QuantType,
    shape: tuple[int, int],
    dtype: str,
    device_type: str,
    *,
    dense_copies: bool,
) -> int:
    """Bytes of what `prepare_linear` makes of a matrix; for block formats see `stored_bytes`.

    Those of a mapped matrix are the file's, which the system may drop and read again.

    Args:
        qtype: how the file stores it.
        shape: (out_features, in_features).
        dtype: of the activations; for the output matrix, of `head_dtype`.
        device_type: ``cpu`` or ``cuda``.
        dense_copies: whether packed weights on a GPU keep a dense copy.
    """
    out_features, in_features = shape
    form = select_form(qtype, shape, dtype, device_type)
    if form == "stored":
        return stored_bytes(qtype, shape)
    if form == "tiles":
        return tiles_bytes(qtype.ggml_id, *shape)
    if form == "mapped":
        return out_features * qtype.row_bytes(in_features)
    dense = out_features * in_features * ITEM_BYTES[dtype]
    if form == "dense":
        return dense
    if form != "packed":
        groups = out_features * in_features // _PLANE_GROUP
        return groups * INT4_PLANES[qtype] * _PLANE_GROUP_BYTES
    group = qtype.block_weights * qtype.group_blocks
    columns = -(-in_features // group) * group
    return out_features * qtype.row_bytes(columns) + (dense if dense_copies else 0)


def stored_bytes(
    qtype: QuantType,
    shape: tuple[int, ...],
    block: tuple[int, int] = (128, 128),
    scale_bytes: int = 1,
) -> int:
    """Bytes of a matrix or a stack of them as stored, with all scales.

    Args:
        qtype: how the file stores it.
        shape: (out_features, in_features) or (experts, out_features, in_features).
        block: FP8_BLOCK: rows and columns of a scale.
        scale_bytes: FP8_BLOCK: of a scale, 1 for E8M0 or 4 for float32.
    """
    *stack, out_features, in_features = shape
    rows = out_features * qtype.row_bytes(in_features)
    if qtype is QuantType.FP8_BLOCK:
        rows += -(-out_features // block[0]) * -(-in_features // block[1]) * scale_bytes
    if qtype is QuantType.NVFP4:
        rows += ITEM_BYTES["float32"]
    return math.prod(stack) * rows
