"""Reader of GGUF files, versions 2 and 3, one file or a split set: header, metadata, tensors.

    0   magic "GGUF"
    4   u32 version
    8   u64 number of tensors
    16  u64 number of metadata pairs
    24  metadata pairs (gguf_metadata.py), tensor records (gguf_tensors.py)
        padding to a multiple of general.alignment (u32, default 32)
        tensor data; each tensor at a multiple of the alignment

Everything is little-endian. A file is hostile until checked: every count, length, type, offset and
product is compared with the file's size before anything is allocated or viewed, and each failure
is one line that names field, byte offset, value and rule. Once `read_gguf` returns, every tensor
is inside its file and no two overlap.

Source: the GGUF specification in the ggml repository (docs/gguf.md); the stricter rules are ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tiercel.loader.gguf_metadata import (
    MAX_PAIRS,
    MIN_PAIR_BYTES,
    Cursor,
    MetadataValue,
    read_metadata,
)
from tiercel.loader.gguf_tensors import MIN_RECORD_BYTES, read_tensors
from tiercel.loader.mapped import MAX_TENSORS, MappedFile, MappedTensors, TensorInfo, shown

HEADER_BYTES = 24
MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 65_536
MAX_PARTS = 1024
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_OTHER_MAGICS = (
    (b"FUGG", "a byte-swapped GGUF file"),
    (b"ggml", "an old GGML file"),
    (b"lmgg", "an old GGML file"),
    (b"fmgg", "an old GGML file"),
    (b"tjgg", "an old GGML file"),
    (b"PK\x03\x04", "a zip archive, as PyTorch writes"),
    (b"\x80\x02", "a Python pickle, which Tiercel never opens"),
    (b"vers", "perhaps a Git LFS pointer instead of the file"),
    (b"<", "perhaps a web page instead of the file"),
)


@dataclass(frozen=True, slots=True)
class GGUFFile(MappedTensors):
    """A checked model in GGUF form; tensors are in file order.

    Attributes:
        version: 2 or 3.
        alignment: ``general.alignment`` of the first file, in bytes.
        metadata: key-value pairs of the first file: int, float, bool, str, list[str], or a
            read-only 1-D numpy view.
        notes: allowed oddities, one sentence each, for `inspect`.
    """

    version: int
    alignment: int
    metadata: dict[str, MetadataValue]
    notes: tuple[str, ...]


def read_gguf(path: Path) -> GGUFFile:
    """Map and check a GGUF file; of a split set, any part may be given.

    Args:
        path: the file.

    Returns:
        The file with every tensor checked; no tensor data has been read.

    Raises:
        ModelNotFoundError: the file or a part is missing or unreadable.
        ModelFormatError: the file breaks its format.
        UnsupportedModelError: an old, big-endian or otherwise valid file that Tiercel does not run.
    """
    first = _read_part(path, 0)
    count = _split_number(first, "split.count", 1)
    if count <= 1:
        return first
    paths = _part_paths(first, count)
    parts = [_read_part(part, index) for index, part in enumerate(paths)]
    return _merge(parts)


def _read_part(path: Path, index: int) -> GGUFFile:
    file = MappedFile(path, HEADER_BYTES)
    cursor = Cursor(file)
    version = _read_version(cursor)
    num_tensors = cursor.count("number of tensors", MIN_RECORD_BYTES, MAX_TENSORS)
    num_pairs = cursor.count("number of metadata pairs", MIN_PAIR_BYTES, MAX_PAIRS)
    metadata = read_metadata(cursor, num_pairs)
    alignment = _alignment(file, metadata)
    cursor.check_items(num_tensors, MIN_RECORD_BYTES, "number of tensors", at=8)
    tensors = read_tensors(cursor, num_tensors, alignment, index)
    end = max((info.offset + info.nbytes for info in tensors.values()), default=cursor.pos)
    notes: tuple[str, ...] = ()
    if file.size - end > alignment:
        notes = (f"{file.name}: {file.size - end} bytes follow the last tensor.",)
    return GGUFFile(path, tensors, (file,), version, alignment, metadata, notes)


def _read_version(cursor: Cursor) -> int:
    file = cursor.file
    magic = file.buffer[cursor.take(4, "magic") : 4]
    if magic != MAGIC:
        guess = next((text for start, text in _OTHER_MAGICS if magic.startswith(start)), "")
        raise file.error(
            f"magic at byte 0 is {magic!r}, not b'GGUF'{guess and f': {guess}'}.",
            hint="Give a GGUF file, version 2 or 3.",
        )
    version = cursor.u32("version")
    if version in VERSIONS:
        return version
    if version and not version & 0xFFFF:
        raise file.unsupported(
            f"version at byte 4 is {version:#010x}: this is a big-endian file.",
            hint="Convert the model to little-endian (gguf-convert-endian).",
        )
    if version == 1:
        raise file.unsupported(
            "version at byte 4 is 1, whose lengths have another size.",
            hint="Convert the model again: versions 2 and 3 are read.",
        )
    raise file.error(f"version at byte 4 is {version}.", hint="Versions 2 and 3 are read.")


def _alignment(file: MappedFile, metadata: dict[str, MetadataValue]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):  # type: ignore[operator]
        raise file.error(
            f"key 'general.alignment' is {shown(value)}.",
            hint=f"It must be a power of two, 8 to {MAX_ALIGNMENT}.",
        )
    return value  # type: ignore[return-value]


def _split_number(part: GGUFFile, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise part.parts[0].error(
            f"key '{key}' is {shown(value)}.", hint="It must be a whole number, 0 or more."
        )
    return value


def _part_paths(first: GGUFFile, count: int) -> list[Path]:
    """The files of a split set, from the name of one of them."""
    file = first.parts[0]
    if count > MAX_PARTS:
        raise file.error(
            f"key 'split.count' is {count}.", hint=f"At most {MAX_PARTS} parts are read."
        )
    match = _SPLIT_NAME.fullmatch(first.path.name)
    if match is None or int(match["count"]) != count:
        raise file.error(
            f"key 'split.count' is {count} but the file's name does not say so.",
            hint=f"Name the parts NAME-00001-of-{count:05}.gguf and so on.",
        )
    stem = match["stem"]
    return [first.path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


def _merge(parts: list[GGUFFile]) -> GGUFFile:
    tensors: dict[str, TensorInfo] = {}
    for index, part in enumerate(parts):
        file = part.parts[0]
        count, number = _split_number(part, "split.count", 1), _split_number(part, "split.no", 0)
        if (count, number) != (len(parts), index):
            raise file.error(
                f"keys 'split.no' and 'split.count' are {number} and {count}.",
                hint=f"By its name this is part {index} of {len(parts)}: fetch the set again.",
            )
        for name, info in part.tensors.items():
            if name in tensors:
                raise file.error(
                    f"tensor {shown(name)} is also in {parts[tensors[name].part].parts[0].name}.",
                    hint="Each tensor is in one part: fetch the set again.",
                )
            tensors[name] = info
    first = parts[0]
    expected = _split_number(first, "split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise first.parts[0].error(
            f"key 'split.tensors.count' is {expected} but the parts hold {len(tensors)} tensors.",
            hint="The parts belong to different models or versions: fetch the set again.",
        )
    files = tuple(part.parts[0] for part in parts)
    notes = tuple(note for part in parts for note in part.notes)
    return GGUFFile(
        first.path, tensors, files, first.version, first.alignment, first.metadata, notes
    )
