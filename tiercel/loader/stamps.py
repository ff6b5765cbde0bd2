"""Identity of a model's files: whether the files that were opened are still those on the disk.

The stamp compares size, time of the last write and inode. The content is not read, which would
take as long as loading. So a byte-identical copy that replaces a file counts as a change, and a
file that was moved away and back does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tiercel.loader.mapped import shown_name

_LOAD_AGAIN = "Start the server again to load the file as it is now."


class FileStamp(msgspec.Struct, frozen=True, array_like=True):
    """Identity of one file.

    Attributes:
        path: absolute path, encoded as by the operating system.
        num_bytes: size of the file.
        mtime_ns: time of the last write.
        inode: number of the file in its file system.
    """

    path: bytes
    num_bytes: int
    mtime_ns: int
    inode: int


def read_stamp(path: Path) -> FileStamp:
    """The current identity of a file.

    Raises:
        OSError: the file does not exist.
    """
    status = path.stat()
    name = os.fsencode(path.absolute())
    return FileStamp(name, status.st_size, status.st_mtime_ns, status.st_ino)


def find_change(stamps: Iterable[FileStamp]) -> str | None:
    """Compare files with their stamps.

    Returns:
        What happened to the first file that changed, and what to do; None if none did.
    """
    changes = (_change(stamp) for stamp in stamps)
    return next((change for change in changes if change is not None), None)


def _change(stamp: FileStamp) -> str | None:
    path = Path(os.fsdecode(stamp.path))
    changed = f"{shown_name(path)} changed since the start"
    try:
        now = read_stamp(path)
    except FileNotFoundError:
        return f"{changed}: it was removed. Put it back and start the server again."
    except OSError as error:
        return f"{changed}: {error.strerror}. Make it readable and start the server again."
    if now == stamp:
        return None
    if now.num_bytes != stamp.num_bytes:
        sizes = f"it had {stamp.num_bytes} bytes and has {now.num_bytes} now"
        return f"{changed}: {sizes}. {_LOAD_AGAIN}"
    return f"{changed}: it was replaced or written to. {_LOAD_AGAIN}"
