"""The bounds of both readers: a file at a bound is read, one beyond it is refused for that bound.

The numbers are repeated here, so that an accidental change of a bound is noticed. Where a file at
a bound would be slow to read, it is broken after the count: it is refused, but not for the count.
"""

import json
import random
import struct

import pytest

from tests.gguf_files import ARRAY, I8, STRING, U8, U16, U64, Typed, assemble, pair, record, string
from tests.loader.test_gguf_hostile import refusal, sparse
from tests.loader.test_safetensors import entry, write
from tests.loader.test_safetensors import refusal as safetensors_refusal
from tiercel.loader import gguf_metadata
from tiercel.loader.gguf import read_gguf
from tiercel.loader.mapped import shown, shown_name
from tiercel.loader.safetensors import INDEX_NAME, read_safetensors

pytestmark = pytest.mark.reliability


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.gguf"


def head(*pairs, num_tensors=0, num_pairs=None):
    num_pairs = len(pairs) if num_pairs is None else num_pairs
    return assemble(list(pairs), num_tensors=num_tensors, num_pairs=num_pairs, alignment=1)


def array_head(key, kind, count):
    return string(key) + struct.pack("<IIQ", ARRAY, kind, count)


def one_tensor(name="w", dims=(8, 4), offset=0, alignment=None):
    pairs = [] if alignment is None else [pair("general.alignment", alignment)]
    return assemble(pairs, [record(name, dims, 0, offset)], bytes(256), alignment=alignment or 32)


READ = {
    "a file of a header alone": (head(), head()[:-1], "needs at least 24"),
    "a key": (head(pair("k" * 65_535, 1)), head(pair("k" * 65_536, 1)), "has 65536 bytes"),
    "a short key": (head(pair("k", 1)), head(pair("", 1)), "key at byte 24 has 0 bytes"),
    "a tensor's name": (one_tensor("n" * 255), one_tensor("n" * 256), "has 256 bytes"),
    "a tensor's short name": (one_tensor("n"), one_tensor(""), "has 0 bytes"),
    "most dimensions": (one_tensor(dims=(4, 2, 1, 2)), one_tensor(dims=(4, 2, 1, 2, 1)), "is 5"),
    "fewest dimensions": (one_tensor(dims=(16,)), one_tensor(dims=()), "is 0"),
    "a dimension": (one_tensor(dims=(1, 1)), one_tensor(dims=(1, 0)), "[1, 0]"),
    "the least alignment": (one_tensor(alignment=8), one_tensor(alignment=4), "is 4"),
    "the largest alignment": (
        one_tensor(alignment=65_536),
        one_tensor(alignment=131_072),
        "is 131072",
    ),
    "the default alignment": (one_tensor(offset=32), one_tensor(offset=16), "alignment 32"),
    "a small alignment": (
        one_tensor(offset=8, alignment=8),
        one_tensor(offset=4, alignment=8),
        "is 4, which is not a multiple of the alignment 8",
    ),
    "a large alignment": (
        one_tensor(offset=64, alignment=64),
        one_tensor(offset=32, alignment=64),
        "is 32, which is not a multiple of the alignment 64",
    ),
    "the end of the data": (one_tensor(dims=(64,)), one_tensor(dims=(65,)), "claims 260 bytes"),
    "the end after an offset": (
        one_tensor(dims=(24,), offset=160),
        one_tensor(dims=(25,), offset=160),
        "claims 100 bytes",
    ),
    "the end of a text": (head(pair("k", "abc")), head(pair("k", "abc"))[:-1], "has 2 more"),
    "the end of an array": (
        head(pair("k", Typed(ARRAY, [7, 8, 9], of=U64))),
        head(pair("k", Typed(ARRAY, [7, 8, 9], of=U64)))[:-1],
        "is 3, which needs 24 bytes or more, but the file has 23",
    ),
    "the end of an array of texts": (
        head(pair("k", ["ab", "cde"])),
        head(pair("k", ["ab", "cde"]))[:-1],
        "item 1 of the array of strings",
    ),
    "pairs": (
        head(*(pair(f"{i:05}", Typed(U8, 1)) for i in range(65_536))),
        head(*(pair(f"{i:05}", Typed(U8, 1)) for i in range(65_537))),
        "is 65537 but Tiercel reads at most 65536",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_file_at_the_bound_is_read_and_one_beyond_is_refused(name, path):
    inside, beyond, words = READ[name]
    path.write_bytes(inside)
    read_gguf(path)
    path.write_bytes(beyond)
    assert words in str(refusal(path))


# The start of a file and its size, at the bound and beyond; the text of a refusal of its count.
COUNTED = {
    "tensors": (
        head(num_tensors=262_144), 24 + 32 * 262_144,
        head(num_tensors=262_145), 24 + 32 * 262_145,
        "number of tensors at byte 8 is 262145 but",
    ),
    "bytes of tensors": (
        head(num_tensors=3), 24 + 32 * 3, head(num_tensors=3), 24 + 32 * 3 - 1,
        "number of tensors at byte 8 is 3, which needs 96 bytes",
    ),
    "bytes of tensors after metadata": (
        head(pair("k", "x" * 99), num_tensors=3), 24 + 120 + 32 * 3,
        head(pair("k", "x" * 99), num_tensors=3), 24 + 120 + 32 * 3 - 1,
        "number of tensors at byte 8 is 3, which needs 96 bytes",
    ),
    "bytes of pairs": (
        head(num_pairs=5), 24 + 13 * 5, head(num_pairs=5), 24 + 13 * 5 - 1,
        "metadata pairs at byte 16 is 5, which needs 65 bytes",
    ),
    "strings": (
        head(array_head("k", STRING, 1 << 22) + b"\xff" * 8, num_pairs=1), 40 << 20,
        head(array_head("k", STRING, (1 << 22) + 1) + b"\xff" * 8, num_pairs=1), 40 << 20,
        "array length at byte 41 is 4194305 but Tiercel reads at most 4194304",
    ),
    "bytes of strings": (
        head(array_head("k", STRING, 3) + b"\xff" * 8, num_pairs=1), 24 + 25 + 3 * 8,
        head(array_head("k", STRING, 3) + b"\xff" * 8, num_pairs=1), 24 + 25 + 3 * 8 - 1,
        "array length at byte 41 is 3, which needs 24 bytes",
    ),
    "parts": (
        head(pair("split.count", Typed(U16, 1024))), 200,
        head(pair("split.count", Typed(U16, 1025))), 200,
        "At most 1024 parts are read",
    ),
    "weights": (
        one_tensor(dims=(2**60 - 1,)), 400, one_tensor(dims=(2**60,)), 400, "below 2**60",
    ),
    "weights of a matrix": (
        one_tensor(dims=(2**20, 2**40 - 1)), 400, one_tensor(dims=(2**20, 2**40)), 400, "2**60",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_a_count_at_its_bound_is_not_what_is_refused(name, path):
    inside, inside_bytes, beyond, beyond_bytes, words = COUNTED[name]
    sparse(path, inside, inside_bytes)
    error = refusal(path)
    assert words.partition(" is ")[0].partition(" 1024")[0] not in f"{error} {error.hint}"
    sparse(path, beyond, beyond_bytes)
    error = refusal(path)
    assert words in f"{error} {error.hint}"


def test_items_of_an_array(path):
    """A file of 256 MiB that occupies a page."""
    for kind in (U8, I8):
        for more in (0, 1):
            start = head(array_head("k", kind, (1 << 28) + more), num_pairs=1)
            sparse(path, start, len(start) + (1 << 28) + more)
            if more:
                assert "is 268435457 but" in str(refusal(path))
            else:
                assert read_gguf(path).metadata["k"].size == 1 << 28


@pytest.mark.parametrize("more", [0, 1])
def test_bytes_of_metadata(path, more):
    """Four arrays end at 1 GiB, or one byte after it."""
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 4))
        for key in "abcd":
            count = 1 << 28
            if key == "d":
                count = (1 << 30) + more - file.tell() - len(array_head(key, U8, 0))
            file.write(array_head(key, U8, count))
            file.truncate(file.tell() + count)
            file.seek(count, 1)
    if more:
        assert "ends beyond 1073741824 bytes" in str(refusal(path))
    else:
        assert sorted(read_gguf(path).metadata) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("kind", ["text", "array"])
def test_bytes_of_one_string(kind, path):
    for more in (0, 1):
        size = (64 << 20) + more
        start = string("k") + struct.pack("<IQ", STRING, size)
        if kind == "array":
            start = array_head("k", STRING, 1) + struct.pack("<Q", size)
        start = head(start, num_pairs=1)
        sparse(path, start, len(start) + size)
        if more:
            assert "67108864" in str(refusal(path))
        else:
            assert len(read_gguf(path).metadata["k"]) in (1, size)


def texts_of(rng, num_bytes):
    """Metadata whose texts, in scalars and arrays, have this many bytes together."""
    pairs = {}
    while num_bytes:
        size = rng.randint(1, num_bytes)
        num_bytes -= size
        cut = rng.randint(0, size)
        pairs[f"key{len(pairs)}"] = rng.choice(
            ["x" * size, ["x" * size], ["y" * cut, "", "z" * (size - cut)]]
        )
    return [pair(key, value) for key, value in pairs.items()]


@pytest.mark.parametrize("seed", range(20))
def test_texts_of_a_file_share_one_budget_of_bytes(seed, path, monkeypatch):
    rng = random.Random(seed)
    budget = rng.randint(2, 60)
    monkeypatch.setattr(gguf_metadata, "MAX_STRING_BYTES", budget)
    path.write_bytes(head(*texts_of(rng, budget)))
    read_gguf(path)
    for more in (1, 9):
        # What follows the last text keeps the file's end from being the reason.
        path.write_bytes(head(*texts_of(rng, budget + more), pair("last", Typed(U64, 1))))
        text = str(refusal(path))
        assert f"at most {budget} of strings" in text or f"above {budget} bytes" in text


@pytest.mark.parametrize("seed", range(10))
def test_arrays_of_a_file_share_one_budget_of_strings(seed, path, monkeypatch):
    rng = random.Random(seed)
    counts = [rng.randint(1, 5) for _ in range(rng.randint(1, 5))]
    monkeypatch.setattr(gguf_metadata, "MAX_STRINGS", sum(counts))
    scalar = pair("scalar", "counts as no item")
    arrays = [pair(f"k{i}", ["x"] * count) for i, count in enumerate(counts)]
    path.write_bytes(head(scalar, *arrays))
    read_gguf(path)
    arrays[-1] = pair("more", ["x"] * (counts[-1] + 1))
    path.write_bytes(head(scalar, *arrays))
    assert f"{sum(counts)}" in str(refusal(path))


def test_what_messages_repeat_is_cut():
    for text in ("x" * 58, b"x" * 57):  # with its quotes 60
        assert shown(text) == repr(text)
        assert shown(text + text[:1]) == repr(text + text[:1])[:60] + "..."
    assert shown("x" * 61) == f"{'x' * 60!r}... (61 long)"
    assert shown(b"\0" * 61) == f"{bytes(60)!r}... (61 long)"
    assert shown([0] * 20) == repr([0] * 20)
    assert shown([0] * 21) == repr([0] * 21)[:60] + "..."


def test_names_of_files_are_cut(tmp_path):
    assert shown_name(tmp_path / ("x" * 120)) == "x" * 120
    assert shown_name(tmp_path / ("x" * 121)) == "x" * 120 + "..."
    assert shown_name(tmp_path / "a\n\x1bb") == r"a\n\x1bb"


# --- safetensors -------------------------------------------------------------------------------


def test_a_header_fills_the_file_and_no_more(tmp_path):
    path = tmp_path / "model.safetensors"
    text = b'{"__metadata__": {"a": "b"}}'
    assert read_safetensors(write(path, text)).tensors == {}
    write(path, text, length=len(text) + 1)
    assert f"is {len(text) + 1} but at most {len(text)} is possible" in safetensors_refusal(path)
    assert read_safetensors(write(path, b"{}")).tensors == {}
    path.write_bytes(path.read_bytes()[:-1])
    assert "needs at least 10" in safetensors_refusal(path)


def test_bytes_of_a_header(tmp_path):
    path = tmp_path / "model.safetensors"
    for more in (0, 1):
        write(path, b"", length=100_000_000 + more)
        with path.open("r+b") as file:
            file.truncate(8 + 100_000_000 + more)
        assert ("at most 100000000 is possible" in safetensors_refusal(path)) == bool(more)


def test_items_of_a_header(tmp_path):
    path = tmp_path / "model.safetensors"
    for more in (0, 1):
        write(path, b"[" + b"0," * ((1 << 20) + more) + b"0]")
        text = safetensors_refusal(path)
        assert ("too many items" if more else "not a JSON object") in text


def test_rank_of_a_tensor(tmp_path):
    path = tmp_path / "model.safetensors"
    file = read_safetensors(write(path, {"a": entry(shape=(1, 2, 1, 4))}, bytes(32)))
    assert file.tensors["a"].dims == (4, 1, 2, 1)
    write(path, {"a": entry(shape=(1, 1, 2, 1, 4))}, bytes(32))
    assert "shape is [1, 1, 2, 1, 4]" in safetensors_refusal(path)


def test_bytes_of_an_index(tmp_path):
    write(tmp_path / "a.safetensors", {"a": entry()}, bytes(32))
    text = json.dumps({"weight_map": {"a": "a.safetensors"}})
    index = tmp_path / INDEX_NAME
    index.write_text(text.ljust(64 << 20))
    assert list(read_safetensors(tmp_path).tensors) == ["a"]
    index.write_text(text.ljust((64 << 20) + 1))
    assert "has 67108865 bytes" in safetensors_refusal(tmp_path)


def test_tensors_of_a_large_model_are_read(tmp_path):
    """As many as DeepSeek-V4-Pro has, with names of its length, all in one shard."""
    names = [f"model.layers.{i // 2400:02}.ffn.experts.{i:06}.w1.weight" for i in range(145_116)]
    tensors = {
        name: entry(dtype="I8", shape=(1, 1), offsets=(i, i + 1)) for i, name in enumerate(names)
    }
    shard = "model-00001-of-00064.safetensors"
    write(tmp_path / shard, tensors, bytes(len(names)))
    index = {"weight_map": dict.fromkeys(names, shard)}
    (tmp_path / INDEX_NAME).write_text(json.dumps(index, indent=2))
    assert len(read_safetensors(tmp_path).tensors) == len(names)


def test_shards_of_an_index(tmp_path):
    for count in (1024, 1025):
        shards = {f"t{i}": f"{i:04}.safetensors" for i in range(count)}
        (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": shards}))
        assert ("too many shards" in safetensors_refusal(tmp_path, Exception)) == (count > 1024)


def test_tensors_of_an_index_are_no_shards(tmp_path):
    """A shard contains thousands of tensors: only the files count."""
    tensors = {f"t{i}": entry(shape=(1,), offsets=(4 * i, 4 * i + 4)) for i in range(1100)}
    write(tmp_path / "a.safetensors", tensors, bytes(4400))
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors")}
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    assert len(read_safetensors(tmp_path).tensors) == 1100
