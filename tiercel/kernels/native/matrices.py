"""Matrices as the native library reads them, and the calls of its products."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.kernels.native.abi import FILE, TILES, Weight
from tiercel.kernels.native.forms import tiles_bytes
from tiercel.kernels.native.library import library, make_pool

HUGE_PAGE, CHUNK_BYTES, ALIGNMENT = 2 << 20, 64 << 20, 64


class NativeMatrix(Struct, frozen=True, eq=False):
    """A matrix (out, in) at rest.

    Attributes:
        data: uint8, tiles or the file's rows; kept alive here for `weight`.
        shape: (out_features, in_features).
        weight: the library's view of it.
        file_rows: (out, row_bytes) uint8 of the file, for `take`; None where no rows are taken.
    """

    data: Tensor
    shape: tuple[int, int]
    weight: Weight
    file_rows: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes at rest, in memory or in the map of the file."""
        return self.data.nbytes

    def take(self, rows: Tensor) -> NativeMatrix | None:
        """Some output rows, in their order; None where the file's rows are not kept.

        rows: (n,) int64.
        """
        if self.file_rows is None:
            return None
        shape = (rows.shape[0], self.shape[1])
        return lay_out(self.weight.type, shape, self.file_rows.index_select(0, rows))

    def copy(self) -> NativeMatrix:
        """The same matrix elsewhere in memory."""
        data, old = self.data.clone(), self.weight
        weight = Weight(data.data_ptr(), *self.shape, old.row_bytes, old.type, old.layout)
        return NativeMatrix(data, self.shape, weight)


@functools.cache
def functions() -> ctypes.CDLL:
    """The library's functions. What the environment allows is asked before, not in each call."""
    return library().lib


def current_pool() -> int:
    """The library's threads, as many as PyTorch uses."""
    return make_pool(torch.get_num_threads()).handle


def lay_out(
    ggml_id: int, shape: tuple[int, int], data: Tensor, *, keeps_rows: bool = False
) -> NativeMatrix:
    """Bring a matrix into the form of `forms.native_form`.

    Args:
        ggml_id: its type.
        shape: (out_features, in_features).
        data: (out, row_bytes) uint8 contiguous, as the file stores it; kept if it rests mapped.
        keeps_rows: whether `data` is kept for `NativeMatrix.take`: in the map it costs nothing.
    """
    rows = data if keeps_rows else None
    weight = Weight(data.data_ptr(), *shape, data.shape[1], ggml_id, FILE)
    num_bytes = tiles_bytes(ggml_id, *shape)
    if not num_bytes:
        return NativeMatrix(data, shape, weight, rows)
    tiles = _allocate(num_bytes)
    functions().tc_pack_tiles(current_pool(), ctypes.byref(weight), tiles.data_ptr())
    weight = Weight(tiles.data_ptr(), *shape, 0, ggml_id, TILES)
    return NativeMatrix(tiles, shape, weight, rows)


class _Arena:
    """Memory for tiles in huge pages: looking up 4 KB pages costs a tenth of decoding's time.

    Matrices are cut from one mapping after the other; a mapping ends with its last matrix.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> Tensor:
        """(num_bytes,) uint8, on a border of 64 bytes. Pages are made when they are written."""
        needed = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if needed > self._free.numel():
            memory = mmap.mmap(-1, max(CHUNK_BYTES, needed) + HUGE_PAGE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without them
                    memory.madvise(mmap.MADV_HUGEPAGE)
            chunk = torch.frombuffer(memory, dtype=torch.uint8)
            self._free = chunk[-chunk.data_ptr() % HUGE_PAGE :]
        taken, self._free = self._free[:num_bytes], self._free[needed:]
        return taken


_allocate = _Arena().allocate


def weight_array(matrices: Sequence[NativeMatrix]) -> ctypes.Array[Weight]:
    """Matrices end to end, as the library takes them."""
    return (Weight * len(matrices))(*(matrix.weight for matrix in matrices))


def launch_linear(x: Tensor, matrices: Sequence[NativeMatrix], out: Tensor, parts: int) -> None:
    """Write x @ [matrices]^T to `out`.

    Args:
        x: (rows, in_features) float32 contiguous.
        matrices: equal in_features, their rows end to end in the result.
        out: (rows, out_features) float32 contiguous.
        parts: of x, each rounded to 8 bits in groups of 32, for weights that are no floats: 0 for
            float32, 1, or 2 for x and what its rounding leaves of it.
    """
    lib, (rows, cols) = functions(), x.shape
    num_bytes = lib.tc_linear_scratch(rows, cols, out.shape[1], parts)
    scratch = torch.empty(num_bytes, dtype=torch.uint8)
    lib.tc_linear(
        current_pool(),
        weight_array(matrices),
        len(matrices),
        x.data_ptr(),
        rows,
        parts,
        scratch.data_ptr(),
        out.data_ptr(),
    )


def launch_dequantize(
    ggml_id: int, data: Tensor, cols: int, row_ids: Tensor | None, out: Tensor
) -> None:
    """Decode rows of a matrix as the file stores it.

    Raises:
        IndexError: a row that does not exist.

    Args:
        ggml_id: its type.
        data: (rows, row_bytes) uint8, bytes of a row adjacent.
        cols: weights of a row.
        row_ids: (n,) int32; None for the first n rows.
        out: (n, cols) float32 contiguous.
    """
    weight = Weight(data.data_ptr(), data.shape[0], cols, data.stride(0), ggml_id, FILE)
    ids = None if row_ids is None else row_ids.data_ptr()
    refused = functions().tc_dequantize(
        current_pool(), ctypes.byref(weight), ids, out.shape[0], out.data_ptr()
    )
    if refused:
        raise IndexError(f"row ids reach beyond {data.shape[0]} rows")
