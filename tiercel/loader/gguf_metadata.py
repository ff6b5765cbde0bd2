"""The key-value section of a GGUF file, and the cursor for every read of its header.

    pair    string key, u32 value type, value
    string  u64 byte length, bytes; no terminator
    array   u32 element type, u64 count, elements

All little-endian. `Cursor.take` is the only way forward: it raises when the file ends first, so no
length or count in the file can lead a read outside of it. Numeric arrays become views of the map;
strings are decoded in one pass over the bytes, because a vocabulary has hundreds of thousands of
strings.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercel.errors import ModelFormatError, UnsupportedModelError
from tiercel.loader.mapped import FETCH_AGAIN, MappedFile, shown

MetadataValue = int | float | bool | str | list[str] | npt.NDArray[np.generic]

MAX_PAIRS = 65_536
MAX_KEY_BYTES = 65_535
MAX_ARRAY_ITEMS = 1 << 28
MAX_METADATA_BYTES = 1 << 30
# Strings are copied into Python objects, so these two bound memory (a 256k vocabulary with its
# merges has 0.8 million strings of 15 MB): all strings of one file together.
MAX_STRINGS = 1 << 22
MAX_STRING_BYTES = 64 << 20
MIN_PAIR_BYTES = 8 + 4 + 1

_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
# GGUF value type: name, numpy type
_NUMBERS: Final = {
    0: ("u8", "<u1"),
    1: ("i8", "<i1"),
    2: ("u16", "<u2"),
    3: ("i16", "<i2"),
    4: ("u32", "<u4"),
    5: ("i32", "<i4"),
    6: ("f32", "<f4"),
    7: ("bool", "|b1"),
    10: ("u64", "<u8"),
    11: ("i64", "<i8"),
    12: ("f64", "<f8"),
}


class Cursor:
    """A position in a mapped file that cannot leave the file.

    Attributes:
        pos: the next byte to read.
        owner: item that is being read, for messages: "key" or "tensor", and its name, or its index
            while the name is not known. Kept apart, because most are never shown.
    """

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.pos = 0
        self.owner: tuple[str, str | int] | None = None
        self.strings_left = MAX_STRINGS
        self.string_bytes_left = MAX_STRING_BYTES

    def fail(self, field: str, offset: int, fact: str, hint: str) -> ModelFormatError:
        """The error for `field` at byte `offset`, which breaks a rule."""
        return self.file.error(self._sentence(field, offset, fact), hint=hint)

    def unsupported(self, field: str, offset: int, fact: str, hint: str) -> UnsupportedModelError:
        """The error for `field` at byte `offset`, which is valid but not supported."""
        return self.file.unsupported(self._sentence(field, offset, fact), hint=hint)

    def _sentence(self, field: str, offset: int, fact: str) -> str:
        owner = f"{self.owner[0]} {shown(self.owner[1])}: " if self.owner else ""
        return f"{owner}{field} at byte {offset} {fact}."

    def take(self, num_bytes: int, field: str) -> int:
        """Step over `num_bytes` and return where they begin."""
        left = self.file.size - self.pos
        if num_bytes > left:
            fact = f"needs {num_bytes} bytes but the file has {left} more"
            raise self.fail(field, self.pos, fact, FETCH_AGAIN)
        start = self.pos
        self.pos += num_bytes
        return start

    def u32(self, field: str) -> int:
        value: int = _U32.unpack_from(self.file.buffer, self.take(4, field))[0]
        return value

    def u64(self, field: str) -> int:
        value: int = _U64.unpack_from(self.file.buffer, self.take(8, field))[0]
        return value

    def count(self, field: str, item_bytes: int, limit: int) -> int:
        """Read a u64 count of items that each take at least `item_bytes`, and check both bounds."""
        value = self.u64(field)
        if value > limit:
            fact = f"is {value} but Tiercel reads at most {limit}"
            raise self.fail(field, self.pos - 8, fact, "The file is damaged.")
        self.check_items(value, item_bytes, field, at=self.pos - 8)
        return value

    def check_items(self, count: int, item_bytes: int, field: str, at: int) -> None:
        """Check that `count` items, announced at byte `at`, can follow."""
        left, needed = self.file.size - self.pos, count * item_bytes
        if needed > left:
            fact = f"is {count}, which needs {needed} bytes or more, but the file has {left} more"
            raise self.fail(field, at, fact, FETCH_AGAIN)

    def name(self, field: str, limit: int) -> str:
        """Read a key or a tensor name of 1 to `limit` bytes of UTF-8."""
        length = self.u64(field)
        if not 1 <= length <= limit:
            fact = f"has {length} bytes"
            raise self.fail(field, self.pos - 8, fact, f"It must have 1 to {limit} bytes.")
        return self._text(self.take(length, field), length, field)

    def string(self, field: str) -> str:
        """Read one string, which must be UTF-8."""
        length = self.u64(field)
        if length > self.string_bytes_left:
            fact = f"has {length} bytes but Tiercel reads at most {MAX_STRING_BYTES} of strings"
            raise self.fail(field, self.pos - 8, fact, "The file is damaged.")
        self.string_bytes_left -= length
        return self._text(self.take(length, field), length, field)

    def strings(self, count: int, field: str) -> list[str]:
        """Read `count` strings in one pass; bytes that are not UTF-8 become lone surrogates."""
        buffer, pos, unpack = self.file.buffer, self.pos, _U64.unpack_from
        stop = min(self.file.size, pos + self.string_bytes_left + 8 * count)
        found: list[bytes] = []
        for index in range(count):
            start = pos + 8
            end = start + unpack(buffer, pos)[0] if start <= stop else start
            if end > stop:
                if stop == self.file.size:
                    fact = f"needs {end - pos} bytes but the file has {self.file.size - pos} more"
                    raise self.fail(f"item {index} of the {field}", pos, fact, FETCH_AGAIN)
                fact = f"brings the strings of this file above {MAX_STRING_BYTES} bytes"
                raise self.fail(f"item {index} of the {field}", pos, fact, "The file is damaged.")
            found.append(buffer[start:end])
            pos = end
        self.string_bytes_left -= pos - self.pos - 8 * count
        self.pos = pos
        try:
            return [data.decode() for data in found]
        except UnicodeDecodeError:
            return [data.decode(errors="surrogateescape") for data in found]

    def _text(self, start: int, length: int, field: str) -> str:
        data = self.file.buffer[start : start + length]
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            broken = data[error.start : error.start + 8]
            fact = f"is not UTF-8: {broken!r} at byte {start + error.start}"
            raise self.fail(field, start, fact, "Keys, names and texts are UTF-8.") from None


def read_metadata(cursor: Cursor, num_pairs: int) -> dict[str, MetadataValue]:
    """Read the key-value section; `num_pairs` has been checked by `Cursor.count`.

    Returns:
        Scalars as int, float, bool or str; numeric arrays as read-only views of the map, (count,)
        in the file's type; string arrays as lists.

    Raises:
        ModelFormatError: a bound, type, encoding or uniqueness rule is broken.
    """
    metadata: dict[str, MetadataValue] = {}
    for index in range(num_pairs):
        cursor.owner = ("key", index)
        at = cursor.pos
        key = cursor.name("key", MAX_KEY_BYTES)
        cursor.owner = ("key", key)
        if key in metadata:
            raise cursor.fail("key", at, "occurs a second time", "Each key occurs once.")
        metadata[key] = _read_value(cursor)
        if cursor.pos > MAX_METADATA_BYTES:
            fact = f"ends beyond {MAX_METADATA_BYTES} bytes of metadata"
            raise cursor.fail("value", cursor.pos, fact, "The file is damaged.")
    cursor.owner = None
    return metadata


def _read_value(cursor: Cursor) -> MetadataValue:
    at = cursor.pos
    kind = cursor.u32("value type")
    if kind == _STRING:
        return cursor.string("text")
    if kind == _ARRAY:
        return _read_array(cursor)
    if kind not in _NUMBERS:
        raise cursor.fail("value type", at, f"is {kind}", "Value types are 0 to 12.")
    return _read_numbers(cursor, kind, 1, "value")[0].item()  # type: ignore[no-any-return]


def _read_array(cursor: Cursor) -> MetadataValue:
    at = cursor.pos
    kind = cursor.u32("element type")
    if kind == _STRING:
        count = cursor.count("array length", 8, MAX_STRINGS)
        if count > cursor.strings_left:
            fact = f"is {count}, which brings the file above {MAX_STRINGS} strings"
            raise cursor.fail("array length", cursor.pos - 8, fact, "The file is damaged.")
        cursor.strings_left -= count
        return cursor.strings(count, "array of strings")
    if kind == _ARRAY:
        hint = "Arrays hold numbers or strings."
        raise cursor.fail("element type", at, "is 9, an array of arrays", hint)
    if kind not in _NUMBERS:
        hint = "Element types are 0 to 8 and 10 to 12."
        raise cursor.fail("element type", at, f"is {kind}", hint)
    item_bytes = np.dtype(_NUMBERS[kind][1]).itemsize
    count = cursor.count("array length", item_bytes, MAX_ARRAY_ITEMS)
    return _read_numbers(cursor, kind, count, "array")


def _read_numbers(cursor: Cursor, kind: int, count: int, field: str) -> npt.NDArray[np.generic]:
    name, dtype = _NUMBERS[kind]
    num_bytes = count * np.dtype(dtype).itemsize
    start = cursor.take(num_bytes, f"{name} {field}")
    data = cursor.file.view(start, num_bytes)
    if kind == _BOOL and count and data.max() > 1:
        first = int(np.argmax(data > 1))
        fact = f"has the byte {data[first]} at byte {start + first}"
        raise cursor.fail(f"bool {field}", start, fact, "A bool is 0 or 1.")
    return data.view(dtype)
