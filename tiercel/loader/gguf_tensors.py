"""The tensor records of a GGUF file: read, checked against the data, turned into `TensorInfo`.

    record  string name, u32 number of dimensions, u64 each dimension, u32 type, u64 offset

`dims[0]` is the contiguous axis. An offset counts from the start of the data section, which is the
end of the records rounded up to the alignment. Records are read first and located afterwards,
because the start is known only then.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tiercel.loader.gguf_metadata import Cursor
from tiercel.loader.mapped import (
    MAX_DIMS,
    TensorInfo,
    check_dims,
    check_no_overlap,
    shown,
)
from tiercel.quant_types import GGML_TYPES, QuantType

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
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}


class _Record(NamedTuple):
    """A record before its location in the file is known; `offset` counts from the data's start."""

    dims: tuple[int, ...]
    qtype: QuantType
    nbytes: int
    offset: int


def read_tensors(
    cursor: Cursor, num_tensors: int, alignment: int, part: int
) -> dict[str, TensorInfo]:
    """Read and check the records of one file; `num_tensors` has been checked by `Cursor.count`.

    Raises:
        ModelFormatError: a record breaks a rule, or a tensor leaves the data or overlaps another.
        UnsupportedModelError: a tensor's type is known but not run.
    """
    records: dict[str, _Record] = {}
    for index in range(num_tensors):
        cursor.owner = ("tensor", index)
        at = cursor.pos
        name = cursor.name("name", MAX_TENSOR_NAME_BYTES)
        cursor.owner = ("tensor", name)
        if name in records:
            raise cursor.fail("name", at, "occurs a second time", "Tensor names are unique.")
        records[name] = _read_record(cursor, alignment)
    cursor.owner = None
    data_start = -(-cursor.pos // alignment) * alignment
    infos: dict[str, TensorInfo] = {}
    for name, (dims, qtype, nbytes, offset) in records.items():
        start = data_start + offset
        if nbytes > cursor.file.size - start:
            raise cursor.file.error(
                f"tensor {shown(name)} claims {nbytes} bytes at byte {start} "
                f"but the file has {cursor.file.size}.",
                hint="The download is incomplete: fetch it again.",
            )
        infos[name] = TensorInfo(name, dims, qtype, nbytes, part, start)
    check_no_overlap(cursor.file, infos.values())
    return infos


def _read_record(cursor: Cursor, alignment: int) -> _Record:
    at = cursor.pos
    num_dims = cursor.u32("number of dimensions")
    if not 1 <= num_dims <= MAX_DIMS:
        fact = f"is {num_dims}"
        raise cursor.fail("number of dimensions", at, fact, f"It must be 1 to {MAX_DIMS}.")
    start = cursor.take(8 * num_dims, "dimensions")
    dims: tuple[int, ...] = struct.unpack_from(f"<{num_dims}Q", cursor.file.buffer, start)
    qtype = _read_type(cursor)
    nbytes = check_dims(
        dims, qtype, lambda fact, hint: cursor.fail("dimensions", start, fact, hint)
    )
    at = cursor.pos
    offset = cursor.u64("offset")
    if offset % alignment:
        fact = f"is {offset}, which is not a multiple of the alignment {alignment}"
        raise cursor.fail("offset", at, fact, "Offsets are multiples of general.alignment.")
    return _Record(dims, qtype, nbytes, offset)


def _read_type(cursor: Cursor) -> QuantType:
    at = cursor.pos
    number = cursor.u32("type")
    qtype = GGML_TYPES.get(number)
    if qtype is not None and (qtype.is_ggml or qtype is QuantType.I32):
        return qtype
    hint = f"Tiercel runs {', '.join(known.name for known in QuantType if known.is_ggml)}."
    if number in WITHDRAWN_TYPES:
        fact = f"is {number} ({WITHDRAWN_TYPES[number]}), which the format has withdrawn"
        raise cursor.unsupported("type", at, fact, f"Convert the model again: {hint}")
    if number in UNSUPPORTED_TYPES:
        fact = f"is {number} ({UNSUPPORTED_TYPES[number]}), which Tiercel does not run"
        raise cursor.unsupported("type", at, fact, hint)
    raise cursor.fail("type", at, f"is {number}, which is not a known type", hint)
