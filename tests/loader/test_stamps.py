"""Files of a model that change after they were opened."""

import os

import pytest

from tiercel.loader.stamps import find_change, read_stamp


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    os.utime(path, ns=(10**18, 10**18))
    return path


def test_an_untouched_file_and_one_that_came_back_are_the_same(path, tmp_path):
    stamps = (read_stamp(path),)
    assert find_change(stamps) is None
    path.read_bytes()
    path.rename(tmp_path / "elsewhere")
    assert "m.gguf changed since the start: it was removed." in find_change(stamps)
    (tmp_path / "elsewhere").rename(path)
    assert find_change(stamps) is None


def test_a_truncated_file_is_told_with_both_sizes(path):
    stamps = (read_stamp(path),)
    os.truncate(path, 3)
    assert "it had 7 bytes and has 3 now. Start the server again" in find_change(stamps)


def test_a_file_of_the_same_size_is_told_by_its_time(path):
    stamps = (read_stamp(path),)
    path.write_bytes(b"WEIGHTS")
    assert "it was replaced or written to." in find_change(stamps)


def test_a_file_of_the_same_size_and_time_is_told_by_its_inode(path, tmp_path):
    stamps = (read_stamp(path),)
    other = tmp_path / "other"
    other.write_bytes(b"WEIGHTS")
    os.utime(other, ns=(10**18, 10**18))
    other.replace(path)
    assert "it was replaced or written to." in find_change(stamps)


def test_the_first_of_several_files_that_changed_is_named(path, tmp_path):
    other = tmp_path / "b\n.gguf"
    other.write_bytes(b"more")
    stamps = (read_stamp(path), read_stamp(other))
    other.write_bytes(b"m")
    assert find_change(stamps).startswith("b\\n.gguf changed")


def test_a_folder_that_may_not_be_read_is_told(path):
    stamps = (read_stamp(path),)
    parent = path.parent
    parent.rename(f"{parent}.old")
    parent.write_bytes(b"")
    assert "m.gguf changed since the start: Not a directory." in find_change(stamps)
