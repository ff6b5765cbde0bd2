"""The tensor records of a GGUF file: read, checked against the data, turned into `TensorInfo`.

    record  string name, u32 number of dimensions, u64 each dimension, u32 type, u64 offset

`dims[0]` is the contiguous axis. An offset counts from the start of the data section, which is the
end of the records rounded up to the alignment. Records are read first and placed afterwards,
because that start is known only then.
"""

from __future__ import annotations

import struct

from tiercel.loader.gguf_metadata import Cursor
from tiercel.loader.mapped import (
    MAX_DIMS,
    TensorInfo,
    check_dims,
    check_no_overlap,
    shown,
)
from tiercel.quant import GGML_TYPES, QuantType

MIN_RECORD_BYTES = 8 + 4 + 8 + 4 + 8
MAX_TENSOR_NAME_BYTES = 255  # the format says 64; longer ones exist

WITHDRAWN_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
UNSUPPORTED_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}


def read_tensors(
    cursor: Cursor, num_tensors: int, alignment: int, part: int
) -> dict[str, TensorInfo]:
    """Read and check the records of one file; `num_tensors` has been checked by `Cursor.count`.

    Raises:
        ModelFormatError: a record breaks a rule, or a tensor does not lie inside the data section
            alone.
        UnsupportedModelError: a tensor's type is known but not run.
    """
    infos: dict[str, TensorInfo] = {}
    for index in range(num_tensors):
        cursor.owner = f"tensor {index} of {num_tensors}"
        at = cursor.pos
        name = cursor.name("name", MAX_TENSOR_NAME_BYTES)
        cursor.owner = f"tensor {shown(name)}"
        if name in infos:
            raise cursor.fail("name", at, "occurs a second time", "Tensor names are unique.")
        infos[name] = _read_record(cursor, name, alignment, part)
    cursor.owner = ""
    data_start = -(-cursor.pos // alignment) * alignment
    placed = {name: _place(cursor, info, data_start) for name, info in infos.items()}
    check_no_overlap(cursor.file, placed.values())
    return placed


def _read_record(cursor: Cursor, name: str, alignment: int, part: int) -> TensorInfo:
    at = cursor.pos
    num_dims = cursor.u32("number of dimensions")
    if not 1 <= num_dims <= MAX_DIMS:
        fact = f"is {num_dims}"
        raise cursor.fail("number of dimensions", at, fact, f"It must be 1 to {MAX_DIMS}.")
    start = cursor.take(8 * num_dims, "dimensions")
    dims: tuple[int, ...] = struct.unpack_from(f"<{num_dims}Q", cursor.file.buffer, start)
    qtype = _read_type(cursor)
    nbytes = check_dims(cursor.file, cursor.owner, dims, qtype, f"at byte {start}")
    at = cursor.pos
    offset = cursor.u64("offset")
    if offset % alignment:
        fact = f"is {offset}, which is no multiple of the alignment {alignment}"
        raise cursor.fail("offset", at, fact, "Offsets are multiples of general.alignment.")
    return TensorInfo(name, dims, qtype, nbytes, part, offset)


def _read_type(cursor: Cursor) -> QuantType:
    at = cursor.pos
    number = cursor.u32("type")
    if number in GGML_TYPES:
        return GGML_TYPES[number]
    supported = ", ".join(qtype.name for qtype in QuantType)
    if number in WITHDRAWN_TYPES:
        raise cursor.file.unsupported(
            f"{cursor.owner}: type at byte {at} is {number} ({WITHDRAWN_TYPES[number]}), "
            "which the format has withdrawn.",
            hint=f"Convert the model again. Tiercel runs {supported}.",
        )
    if number in UNSUPPORTED_TYPES:
        raise cursor.file.unsupported(
            f"{cursor.owner}: type at byte {at} is {number} ({UNSUPPORTED_TYPES[number]}), "
            "which Tiercel does not run.",
            hint=f"Use a file with {supported}.",
        )
    fact = f"is {number}, which is no known type"
    raise cursor.fail("type", at, fact, f"Tiercel runs {supported}.")


def _place(cursor: Cursor, info: TensorInfo, data_start: int) -> TensorInfo:
    """Turn an offset in the data into one in the file, checked to be followed by the tensor."""
    size, start = cursor.file.size, data_start + info.offset
    if info.nbytes > size - start:
        raise cursor.file.error(
            f"tensor {shown(info.name)} claims {info.nbytes} bytes at byte {start} "
            f"but the file has {size}.",
            hint="The download is incomplete: fetch it again.",
        )
    return TensorInfo(info.name, info.dims, info.qtype, info.nbytes, info.part, start)
