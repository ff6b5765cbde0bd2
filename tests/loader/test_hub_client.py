"""Answers of the hub: ranges, sizes, hashes and addresses at their bounds."""

import pytest

from tiercel.errors import ModelNotFoundError
from tiercel.loader import hub_client
from tiercel.loader.hub_client import ConnectionLostError, HubClient


class Answer:
    """The part of a response that the client reads."""

    def __init__(self, headers=None, chunks=()):
        self.headers = headers or {}
        self._chunks = chunks
        self.num_read = 0

    def iter_bytes(self):
        for chunk in self._chunks:
            self.num_read += 1
            yield chunk


@pytest.mark.parametrize(
    ("header", "is_sound"),
    [
        ("bytes 5-99/100", True),
        ("bytes 5-5/100", True),
        ("bytes 4-99/100", False),
        ("bytes 6-99/100", False),
        ("bytes 5-99/99", False),
        ("bytes 5-99/101", False),
        ("bytes 0-99/100", False),
        ("bytes 5-99/*", False),
        ("bytes */100", False),
        ("items 5-99/100", False),
        ("", False),
        (None, False),
    ],
)
def test_a_part_is_the_one_that_was_asked_for(header, is_sound):
    answer = Answer({} if header is None else {"content-range": header})
    if is_sound:
        assert hub_client._range_start(answer, 5, 100) == 5
    else:
        with pytest.raises(ConnectionLostError, match="another part"):
            hub_client._range_start(answer, 5, 100)


@pytest.mark.parametrize("size", [1, 3, 50])
def test_a_body_is_read_to_its_bound(size):
    data = bytes(range(100))
    chunks = [data[i : i + size] for i in range(0, 100, size)]
    for limit in (98, 99, 100, 101):
        answer = Answer(chunks=chunks)
        found = hub_client._read_at_most(answer, limit)
        assert data.startswith(found)
        assert (found == data) == (limit >= 99 or len(found) == 100)
        assert len(found) > limit or found == data
        assert len(found) <= limit + size
    endless = Answer(chunks=(b"x" for _ in range(10**9)))
    assert len(hub_client._read_at_most(endless, 1000)) == 1001


@pytest.mark.parametrize(
    ("size", "digest", "is_sound"),
    [
        (0, "a" * 40, True),
        ((1 << 60) - 1, "0" * 64, True),
        (1 << 60, "a" * 40, False),
        (-1, "a" * 40, False),
        (None, "a" * 40, False),
        (1, "a" * 39, False),
        (1, "a" * 41, False),
        (1, "A" * 40, False),
        (1, "g" * 40, False),
        (1, "a" * 64 + "\n", False),
        (1, None, False),
    ],
)
@pytest.mark.parametrize("is_large", [False, True])
def test_a_listed_file_has_a_size_and_a_hash(size, digest, is_sound, is_large):
    if is_large and (size is None or digest is None):
        return  # their types say so
    large = hub_client._LargeFile(digest, size) if is_large else None
    small = (7, "b" * 40) if is_large else (size, digest)  # what is kept apart has its own
    file = hub_client._File("x.gguf", *small, large)
    if is_sound:
        found = hub_client._remote_file(file)
        assert (found.name, found.content.size_bytes, found.content.digest) == (
            "x.gguf", size, digest,
        )  # fmt: skip
    else:
        with pytest.raises(ValueError, match=r"x\.gguf has no size or hash"):
            hub_client._remote_file(file)


@pytest.mark.parametrize(
    ("address", "is_sound"),
    [
        ("https://hub.example", True),
        ("http://localhost:1234", True),
        ("http://127.0.0.1:1", True),
        ("http://127.9.9.9", True),
        ("http://[::1]:80", True),
        ("http://hub.example", False),
        ("http://127.0.0.1.hub.example", False),
        ("http://localhost.hub.example", False),
        ("http://10.0.0.1", False),
        ("http://0.0.0.0", False),
        ("ftp://localhost", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_addresses_are_https_or_this_machine(address, is_sound):
    if is_sound:
        HubClient(address)
    else:
        with pytest.raises(ModelNotFoundError, match="is not https"):
            HubClient(address)
