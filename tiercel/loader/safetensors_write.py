"""Writer of safetensors folders: one `model.safetensors`, or shards of bounded size and an index.

The layout of a file is in `safetensors.py`. It is known before any data is: the header is written
first, then each tensor at its place, in whatever order the data comes. So a converter holds one
tensor at a time, and tensors of wide elements come first in the file, which aligns all of them.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiercel.loader.safetensors import DTYPES, INDEX_NAME, SINGLE_NAME

SHARD_BYTES = 5_000_000_000  # of a file at most, unless one tensor alone has more
_ENTRY_BYTES = 160  # of a header at most for a tensor, beside its name
_PIECE_BYTES = 64 << 20  # written at once, so that Ctrl-C is noticed within a tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file to be written.

    Attributes:
        name: as in the header.
        dtype: as in the header, one of `DTYPES`.
        shape: as in the header; () for a scalar.
        nbytes: of its data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def file_bytes(self) -> int:
        """Bytes that it takes in a file at most, its part of the header included."""
        return self.nbytes + len(json.dumps(self.name)) + _ENTRY_BYTES


def split_shards(
    groups: Iterable[Sequence[Entry]], limit: int = SHARD_BYTES
) -> dict[str, list[Entry]]:
    """Distribute tensors over files in their order.

    Args:
        groups: tensors that share a file.
        limit: bytes of a file; a group of more has a file of its own.

    Returns:
        Tensors by the name of their file.
    """
    shards: list[list[Entry]] = [[]]
    left = limit
    for group in groups:
        size = sum(entry.file_bytes for entry in group)
        if size > left and shards[-1]:
            shards.append([])
            left = limit
        shards[-1].extend(group)
        left -= size
    if len(shards) == 1:
        return {SINGLE_NAME: shards[0]}
    return {
        f"model-{number:05}-of-{len(shards):05}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


def write_shard(
    path: Path, entries: Sequence[Entry], pieces: Iterable[tuple[str, npt.NDArray[np.uint8]]]
) -> None:
    """Write one file to disk.

    Args:
        path: of the file, which must not exist.
        entries: its tensors.
        pieces: name and (nbytes,) uint8 of each, in any order.

    Raises:
        OSError: names the file.
    """
    header, offsets = _lay_out(entries)
    missing = {entry.name: entry.nbytes for entry in entries}
    try:
        with path.open("xb") as stream:
            stream.write(header)
            for name, data in pieces:
                assert missing.pop(name) == len(data), name
                stream.seek(offsets[name])
                for start in range(0, len(data), _PIECE_BYTES):
                    stream.write(data[start : start + _PIECE_BYTES].data)
            assert not missing
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_index(folder: Path, shards: Mapping[str, Sequence[Entry]]) -> None:
    """Write the index of several files; one alone has none."""
    if len(shards) == 1:
        return
    index = {
        "metadata": {"total_size": sum(e.nbytes for shard in shards.values() for e in shard)},
        "weight_map": {entry.name: file for file, shard in shards.items() for entry in shard},
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _lay_out(entries: Sequence[Entry]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file, and where in it each tensor begins."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for entry in sorted(entries, key=lambda entry: -DTYPES[entry.dtype].block_bytes):
        starts[entry.name] = end
        offsets = [end, end + entry.nbytes]
        table[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        end += entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + start for name, start in starts.items()}
