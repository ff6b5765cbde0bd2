"""Unchecked weight files: mapped read-only, with checked ranges and worded errors.

Both readers (`gguf.py`, `safetensors.py`) return the same two things: `MappedFile` parts and
`TensorInfo` records whose byte ranges were checked against the file. The rule of this module:
arithmetic on the claims of a file is done in Python integers, which cannot wrap, and
nothing is allocated or viewed before the claim was compared with the file's size. The size is read
once; a file that shrinks later is the owner's fault.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tiercel.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from tiercel.quant_types import QuantType

MAX_ECHO_CHARS = 60  # of a value from a file, in an error message
MAX_NAME_CHARS = 120  # of a file's own name, in an error message
# Records cost about 5 us and 310 bytes each: 1.3 s and 80 MB for a hostile file at the cap. Models
# of hundreds of experts have under 100,000 tensors.
MAX_TENSORS = 1 << 18
MAX_DIMS = 4
MAX_WEIGHTS = 1 << 60  # per tensor: byte counts then stay below 2**63
FETCH_AGAIN = "The file is cut off or damaged: fetch it again."


class TensorInfo(Struct, frozen=True):
    """Location of one tensor.

    Attributes:
        name: name as spelled in the file.
        dims: 1 to 4 sizes in file order: ``dims[0]`` is contiguous, so a matrix is (in, out).
        qtype: storage type.
        nbytes: bytes of the tensor in the file.
        part: index of the file that contains it, for models in several files.
        offset: first byte, counted from the start of that file.
    """

    name: str
    dims: tuple[int, ...]
    qtype: QuantType
    nbytes: int
    part: int
    offset: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in): rows of contiguous weights; a vector is (1, n), further axes join out."""
        return math.prod(self.dims[1:]), self.dims[0]

    @property
    def stack_shape(self) -> tuple[int, int, int]:
        """(experts, out, in) of a stack of matrices; experts is 1 for a matrix or a vector."""
        out = self.dims[1] if len(self.dims) > 1 else 1
        return math.prod(self.dims[2:]), out, self.dims[0]


def shown(value: object) -> str:
    """A value from a file for an error message: quoted, escaped, cut at MAX_ECHO_CHARS."""
    if isinstance(value, str | bytes) and len(value) > MAX_ECHO_CHARS:
        return f"{value[:MAX_ECHO_CHARS]!r}... ({len(value)} long)"
    text = repr(value)
    return text if len(text) <= MAX_ECHO_CHARS else text[:MAX_ECHO_CHARS] + "..."


def shown_name(path: Path) -> str:
    """The last part of a path without control characters, shortened: the start of messages."""
    name = path.name or str(path)
    if len(name) > MAX_NAME_CHARS:
        name = name[:MAX_NAME_CHARS] + "..."
    return name if name.isprintable() else repr(name)[1:-1]


class MappedFile:
    """One regular file, mapped read-only, with its size read once.

    Args:
        path: a regular file, or a link to one. Pipes, devices and folders are refused without
            opening them.
        min_bytes: the least size that its format allows, at least 1.

    Raises:
        ModelNotFoundError: the file does not exist, or this user may not read it.
        ModelFormatError: not a regular file, or too short.
    """

    def __init__(self, path: Path, min_bytes: int) -> None:
        self.path = path
        self.name = shown_name(path)
        try:
            self._check_regular(os.stat(path).st_mode)
            # O_NONBLOCK: a pipe put here since the check must not block the open.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise self._open_error(error) from None
        try:
            status = os.fstat(descriptor)
            self._check_regular(status.st_mode)
            self.size = status.st_size
            if self.size < min_bytes:
                raise self.error(
                    f"the file has {self.size} bytes but its format needs at least {min_bytes}.",
                    hint=FETCH_AGAIN,
                )
            self.buffer = mmap.mmap(descriptor, self.size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise self._open_error(error) from None
        finally:
            os.close(descriptor)

    def view(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """(num_bytes,) uint8, read-only view of the map; the caller has checked the range."""
        assert 0 <= offset <= offset + num_bytes <= self.size
        return np.frombuffer(memoryview(self.buffer)[offset : offset + num_bytes], np.uint8)

    def release_pages(self) -> None:
        """Give the map's pages back; what is read again comes from the page cache."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.buffer.madvise(mmap.MADV_DONTNEED)

    def error(self, message: str, *, hint: str) -> ModelFormatError:
        """The error for a broken rule; its text begins with the file's name."""
        return ModelFormatError(f"{self.name}: {message}", hint=hint)

    def unsupported(self, message: str, *, hint: str) -> UnsupportedModelError:
        """The error for a valid file that Tiercel does not run."""
        return UnsupportedModelError(f"{self.name}: {message}", hint=hint)

    def _check_regular(self, mode: int) -> None:
        if stat.S_ISREG(mode):
            return
        kinds = {
            stat.S_IFDIR: "a folder",
            stat.S_IFIFO: "a pipe",
            stat.S_IFCHR: "a device",
            stat.S_IFBLK: "a device",
            stat.S_IFSOCK: "a socket",
        }
        raise self.error(
            f"this is {kinds.get(stat.S_IFMT(mode), 'a special file')}, not a regular file.",
            hint="Give the path of the model file itself.",
        )

    def _open_error(self, error: OSError | ValueError) -> ModelNotFoundError:
        if isinstance(error, PermissionError):
            return ModelNotFoundError(
                f"{self.name}: this user may not read the file.", hint="Grant read permission."
            )
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return ModelNotFoundError(
            f"{self.name}: the file cannot be opened: {reason}.",
            hint="Check the path of the model.",
        )


def check_dims(
    dims: Sequence[int], qtype: QuantType, fail: Callable[[str, str], ModelFormatError]
) -> int:
    """Check a tensor's sizes and return its bytes.

    Args:
        dims: in file order, ``dims[0]`` contiguous.
        qtype: the storage type, whose blocks must fill each row.
        fail: makes the error from a fact about the dimensions and a hint.

    Raises:
        ModelFormatError: a size below 1, too many weights, or a row that is not whole blocks.
    """
    _, block_weights, block_bytes = qtype.value
    weights = math.prod(dims)
    if min(dims) < 1:
        raise fail(f"are {shown(list(dims))}", "Each dimension must be at least 1.")
    if weights >= MAX_WEIGHTS:
        raise fail(f"are {shown(list(dims))}", "Their product must stay below 2**60.")
    if dims[0] % block_weights:
        hint = f"Rows of {qtype.name} are whole blocks of {block_weights} weights."
        raise fail(f"are {shown(list(dims))}, so a row has {dims[0]} weights", hint)
    return weights // block_weights * block_bytes


def check_no_overlap(file: MappedFile, tensors: Iterable[TensorInfo]) -> None:
    """Check that no byte of a file belongs to two of `tensors`, all of that file.

    Raises:
        ModelFormatError: names the first two tensors that overlap.
    """
    ordered = sorted(tensors, key=lambda info: info.offset)
    for left, right in itertools.pairwise(ordered):
        if left.offset + left.nbytes > right.offset:
            raise file.error(
                f"tensor {shown(right.name)} at byte {right.offset} overlaps "
                f"tensor {shown(left.name)}, which ends at byte {left.offset + left.nbytes}.",
                hint="Each byte of the data belongs to one tensor at most.",
            )


@dataclass(frozen=True, slots=True)
class MappedTensors:
    """Checked tensors in one file or several.

    Attributes:
        path: the given path, or the first file.
        tensors: tensors of all files, by name.
        parts: mapped files, usually one.
    """

    path: Path
    tensors: dict[str, TensorInfo]
    parts: tuple[MappedFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(part.size for part in self.parts)

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """(out, row_bytes) uint8, read-only: the bytes of tensor `name`, in the map.

        Of a stack the rows of all matrices are end to end, (experts * out, row_bytes).

        Raises:
            KeyError: no such tensor; look into `tensors` first.
        """
        info = self.tensors[name]
        out, in_features = info.shape
        rows = self.parts[info.part].view(info.offset, info.nbytes)
        return rows.reshape(out, info.qtype.row_bytes(in_features))
