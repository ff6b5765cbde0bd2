"""Full scan of a model's weights for NaN and infinity, for `tiercel inspect --verify`.

A float weight, or the fp16 scale of a block, is NaN or infinite exactly when its exponent bits are
all ones; a byte of E4M3 is NaN when all bits but the sign are ones, a byte of E8M0 when all are. So
the scan compares bits and decodes nothing. It reads every byte of them once, in chunks, and keeps
the bits of one chunk in memory. Integers and bytes that two values share are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tiercel.loader.mapped import TensorInfo, shown
from tiercel.quant_types import QuantType

CHUNK_BYTES = 8 << 20

# Storage type: the fields to test, each (name, first byte in the block).
SCALE_FIELDS: Final = {
    QuantType.Q4_0: (("d", 0),),
    QuantType.Q4_1: (("d", 0), ("m", 2)),
    QuantType.Q5_0: (("d", 0),),
    QuantType.Q5_1: (("d", 0), ("m", 2)),
    QuantType.Q8_0: (("d", 0),),
    QuantType.Q2_K: (("d", 80), ("dmin", 82)),
    QuantType.Q3_K: (("d", 108),),
    QuantType.Q4_K: (("d", 0), ("dmin", 2)),
    QuantType.Q5_K: (("d", 0), ("dmin", 2)),
    QuantType.Q6_K: (("d", 208),),
    QuantType.IQ4_NL: (("d", 0),),
    QuantType.IQ4_XS: (("d", 0),),
    QuantType.IQ2_XXS: (("d", 0),),
    QuantType.MXFP4: (("e", 0),),
    QuantType.F8_E8M0: (("e", 0),),
}
# Float type: its numpy integer and the exponent bits.
_EXPONENTS: Final = {
    QuantType.F32: ("<u4", 0x7F800000),
    QuantType.F16: ("<u2", 0x7C00),
    QuantType.BF16: ("<u2", 0x7F80),
}


# Type with a byte that is NaN: the bits that are all ones then.
_NAN_BYTES: Final = {
    QuantType.MXFP4: 0xFF,
    QuantType.F8_E8M0: 0xFF,
    QuantType.F8_E4M3: 0x7F,
}
SKIPPED: Final = (QuantType.U8, QuantType.I8, QuantType.I32, QuantType.I64)


class WeightFile(Protocol):
    """The interface of both readers that a scan needs."""

    @property
    def tensors(self) -> dict[str, TensorInfo]: ...

    def data(self, name: str) -> npt.NDArray[np.uint8]: ...


class NonFinite(Struct, frozen=True):
    """A tensor that contains NaN or infinity; `str()` of it is the sentence for the user.

    Attributes:
        tensor: name of the tensor.
        field: "weight" of a float type, or the scale: "d", "m", "dmin", "e".
        row: the first affected output row.
        count: number of affected weights or blocks in the whole tensor.
    """

    tensor: str
    field: str
    row: int
    count: int

    def __str__(self) -> str:
        what = "weights" if self.field == "weight" else f"block scales '{self.field}'"
        return (
            f"tensor {shown(self.tensor)} holds {self.count} {what} that are NaN or infinite, "
            f"first in row {self.row}."
        )


def find_nonfinite(
    file: WeightFile, on_progress: Callable[[int], None] | None = None
) -> Iterator[NonFinite]:
    """Scan every tensor for NaN and infinity.

    Args:
        file: a `GGUFFile` or `SafetensorsFiles`.
        on_progress: called with the bytes scanned so far, after each chunk.

    Yields:
        One finding for each affected field of each affected tensor, in file order.
    """
    done = 0
    for name, info in file.tensors.items():
        if info.qtype in SKIPPED:
            done += info.nbytes
            if on_progress is not None:
                on_progress(done)
            continue
        data = file.data(name).reshape(-1)
        fields = SCALE_FIELDS.get(info.qtype, (("weight", 0),))
        blocks_per_row = info.shape[1] // info.qtype.block_weights
        first: dict[str, int] = {}
        count = dict.fromkeys((field for field, _ in fields), 0)
        step = CHUNK_BYTES // info.qtype.block_bytes * info.qtype.block_bytes
        for start in range(0, data.size, step):
            chunk = data[start : start + step]
            for field, at in fields:
                is_bad = _nonfinite(chunk, info.qtype, at)
                found = int(np.count_nonzero(is_bad))
                if found:
                    block = start // info.qtype.block_bytes + int(np.argmax(is_bad))
                    first.setdefault(field, block // blocks_per_row)
                    count[field] += found
            done += chunk.size
            if on_progress is not None:
                on_progress(done)
        for field, row in first.items():
            yield NonFinite(name, field, row, count[field])


def _nonfinite(chunk: npt.NDArray[np.uint8], qtype: QuantType, at: int) -> npt.NDArray[np.bool_]:
    """(blocks,) bool of a chunk of whole blocks; `at` is the first byte of an fp16 scale."""
    is_bad: npt.NDArray[np.bool_]
    if qtype in _EXPONENTS:
        dtype, mask = _EXPONENTS[qtype]
        bits = chunk.view(dtype)
        is_bad = (bits & bits.dtype.type(mask)) == mask
        return is_bad
    if qtype in _NAN_BYTES:
        mask = _NAN_BYTES[qtype]
        is_bad = (chunk.reshape(-1, qtype.block_bytes)[:, at] & mask) == mask
        return is_bad
    # The exponent of a little-endian fp16 is in its second byte.
    high = chunk.reshape(-1, qtype.block_bytes)[:, at + 1]
    is_bad = (high & 0x7C) == 0x7C
    return is_bad
