"""The GGUF reader on hostile files: one of our errors, in one line, and never an invalid read."""

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gguf_files import (
    ARRAY,
    BOOL,
    ENCODERS,
    F32,
    STRING,
    Stored,
    Typed,
    assemble,
    pair,
    quantised,
    record,
    tiny_model,
    write_gguf,
)
from tests.hostile_files import container_hostiles
from tiercel.errors import ModelFormatError, UnsupportedModelError
from tiercel.loader import gguf_metadata
from tiercel.loader.gguf import read_gguf

pytestmark = pytest.mark.reliability

HOSTILES = dict(container_hostiles())
ALLOWED = (ModelFormatError, UnsupportedModelError)
MAX_BYTES = 16 << 20  # a refusal needs far less; the promise is 300 MiB


def refusal(path):
    """Read a hostile file; return the error after checking its form."""
    with pytest.raises(ALLOWED) as caught:
        read_gguf(path)
    error = caught.value
    text = str(error)
    assert text.startswith(f"{path.name}: ")
    assert text.endswith(".")
    assert text.isprintable(), "one line, nothing that moves a terminal's cursor"
    assert len(text) < 400
    assert error.hint.isprintable()
    assert error.hint.endswith(".")
    assert error.__cause__ is None, "the sentence is the whole story"
    return error


def mixed_file(path):
    """A small file with every kind of field: about 500 bytes of header, data without padding."""
    rng = np.random.default_rng(0)
    pairs = {
        "general.architecture": "llama",
        "number": 7,
        "real": 0.5,
        "truth": True,
        "texts": ["a", "bc", b"\xff"],
        "reals": [0.5, 1.5],
        "truths": Typed(ARRAY, [True, False], of=BOOL),
    }
    tensors = {
        "a.weight": rng.normal(size=(3, 32)).astype(np.float32),
        "b.weight": quantised(rng.normal(size=(16, 64)), "Q4_0"),
        "c.weight": quantised(rng.normal(size=(2, 256)), "Q4_K"),
    }
    return write_gguf(path, pairs, tensors)


@pytest.mark.parametrize("name", HOSTILES)
def test_hostile_file_is_refused(name, tmp_path):
    path = tmp_path / "hostile.gguf"
    HOSTILES[name](path)
    tracemalloc.start()
    try:
        refusal(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MAX_BYTES


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("c1_version_1", ["version", "byte 4", " 1"]),
        ("c1_big_endian", ["big-endian"]),
        ("c2_tensors_max", ["number of tensors", "byte 8", "18446744073709551615", "262144"]),
        ("c2_pairs_max", ["metadata pairs", "byte 16", "65536"]),
        ("c2_tensors_100000", ["number of tensors", "byte 8", "needs 3200000 bytes"]),
        ("c2_pairs_60000", ["metadata pairs", "byte 16", "needs 780000 bytes"]),
        ("c7_product_wraps", ["'a.weight'", "[4294967296, 4294967296]", "2**60"]),
        ("c4_text_length_2_40", ["'x.y'", "1099511627776"]),
        ("c5_nested_arrays", ["'x.y'", "array of arrays"]),
        ("c6_alignment_3", ["'general.alignment'", " 3"]),
        ("c7_type_withdrawn_31", ["'a.weight'", "31", "Q4_0_4_4", "withdrawn"]),
        ("c7_type_iq2_xs", ["'a.weight'", "IQ2_XS"]),
        ("c7_ragged_q4_k", ["'a.weight'", "250", "256"]),
        ("c7_overlap_by_one", ["'b.weight'", "'a.weight'", "overlaps"]),
        ("c7_offset_past_end", ["'a.weight'", "1024 bytes", "1152"]),
    ],
)
def test_refusal_names_field_value_and_place(name, words, tmp_path):
    path = tmp_path / "hostile.gguf"
    HOSTILES[name](path)
    error = refusal(path)
    text = f"{error} {error.hint}"
    assert [word for word in words if word not in text] == []


def test_cut_at_every_byte(tmp_path):
    content = mixed_file(tmp_path / "sound.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        refusal(path)
    path.write_bytes(content)
    assert len(read_gguf(path).tensors) == 3


def test_cut_at_200_places_of_a_model(tmp_path):
    content = tiny_model(tmp_path / "sound.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in np.linspace(0, len(content) - 1, 200).astype(int):
        path.write_bytes(content[:size])
        refusal(path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A valid file, and the path where its mutations are written."""
    folder = tmp_path_factory.mktemp("mutations")
    return mixed_file(folder / "sound.gguf").read_bytes(), folder / "mutation.gguf"


def load_or_refuse(path, content):
    path.write_bytes(content)
    try:
        file = read_gguf(path)
    except ALLOWED:
        refusal(path)
        return
    for name, info in file.tensors.items():  # every byte of an accepted file can be read
        assert file.data(name).nbytes == info.nbytes
        file.data(name).sum()


INTERESTING = st.one_of(
    st.binary(min_size=1, max_size=1),
    st.sampled_from([b"\0" * 8, b"\xff" * 8, b"\0" * 7 + b"\x80", b"\1" + b"\0" * 7, b"\xff" * 4]),
    st.integers(0, 2**64 - 1).map(lambda value: struct.pack("<Q", value)),
)


@settings(max_examples=300, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 900), INTERESTING), min_size=1, max_size=4))
def test_overwritten_bytes_load_or_are_refused(sound, edits):
    content, path = sound
    changed = bytearray(content)
    for at, data in edits:
        changed[at : at + len(data)] = data
    load_or_refuse(path, changed)


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 900), removed=st.integers(0, 64), added=st.binary(max_size=64))
def test_shifted_bytes_load_or_are_refused(sound, at, removed, added):
    content, path = sound
    load_or_refuse(path, content[:at] + added + content[at + removed :])


@settings(max_examples=100, deadline=None)
@given(tail=st.binary(max_size=400), counts=st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_noise_behind_a_header_loads_or_is_refused(sound, tail, counts):
    path = sound[1]
    load_or_refuse(path, b"GGUF" + struct.pack("<IQQ", 3, *counts) + tail)


def sparse(path, content, size):
    with path.open("wb") as file:
        file.write(content)
        file.truncate(size)


def test_announced_strings_of_a_huge_sparse_file_are_capped(tmp_path):
    """A gigabyte of zeros is a gigabyte of empty strings: refused before the first is read."""
    path = tmp_path / "sparse.gguf"
    head = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", ARRAY, STRING, 1 << 27)
    sparse(path, assemble([head], num_pairs=1, alignment=1), 2 << 30)
    assert "array length" in str(refusal(path))


def test_strings_are_capped_over_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_metadata, "MAX_STRINGS", 4)
    path = tmp_path / "x.gguf"
    path.write_bytes(assemble([pair("a", ["x", "y"]), pair("b", ["x", "y"])]))
    assert len(read_gguf(path).metadata) == 2
    path.write_bytes(assemble([pair("a", ["x", "y"]), pair("b", ["x", "y", "z"])]))
    assert "'b': array length" in str(refusal(path))


def test_one_string_is_capped(tmp_path):
    path = tmp_path / "sparse.gguf"
    size = gguf_metadata.MAX_STRING_BYTES + 1
    head = struct.pack("<Q", 1) + b"k" + struct.pack("<IQ", STRING, size)
    sparse(path, assemble([head], num_pairs=1, alignment=1), size + 4096)
    assert "at most 67108864 of strings" in str(refusal(path))


def test_string_bytes_of_arrays_are_capped(tmp_path):
    path = tmp_path / "sparse.gguf"
    size = gguf_metadata.MAX_STRING_BYTES + 1
    head = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQQ", ARRAY, STRING, 1, size)
    sparse(path, assemble([head], num_pairs=1, alignment=1), size + 4096)
    assert "brings the strings" in str(refusal(path))


def test_large_sparse_file_costs_no_memory(tmp_path):
    """8 GiB of weights are mapped, not read."""
    path = tmp_path / "sparse.gguf"
    head = assemble([], [record("w", (1 << 16, 1 << 15), 0, 0)])
    sparse(path, head, len(head) + (8 << 30))
    file = read_gguf(path)
    assert file.data("w").shape == (1 << 15, 4 << 16)
    assert file.data("w")[-1, -1] == 0


def test_values_in_messages_are_short_and_escaped(tmp_path):
    path = tmp_path / "x.gguf"
    pairs = {"general.alignment": "\x1b[31m\n" * 10_000}
    write_gguf(path, pairs, {})
    assert "\\x1b" in str(refusal(path))
    path.write_bytes(assemble([], [record("\u202e\n" + "n" * 200, (64, 4), 99, 0)], bytes(1024)))
    assert "\\u202e" in str(refusal(path))
    write_gguf(path, {"k\n" * 1000: Typed(F32, 1.0), "general.alignment": 3}, {})
    refusal(path)


@pytest.mark.parametrize("type_name", ["MXFP4", "IQ2_XXS", "Q4_K"])
def test_stacks_are_checked(type_name, tmp_path):
    """Sizes of a 3-D tensor that its bytes, or its blocks, do not allow; and cut files."""
    block = ENCODERS[type_name][1]
    path = tmp_path / "x.gguf"
    data = quantised(np.ones((3, 5, 2 * block)), type_name)
    content = write_gguf(path, {}, {"w": data}).read_bytes()
    for dims, words in (
        ((2 * block, 5, 4), "claims"),
        ((2 * block, 6, 3), "claims"),
        ((2 * block, 5, 3, 2), "claims"),
        ((2 * block, 5, 0), "at least 1"),
        ((2 * block, 0, 3), "at least 1"),
        ((2 * block, 2**40, 2**40), "2**60"),
        ((block + 1, 5, 3), "whole blocks"),
        ((block, 5, 3, 1, 1), "1 to 4"),
    ):
        wrong = Stored(dims, data.type_id, data.data)
        write_gguf(path, {}, {"w": wrong})
        error = refusal(path)
        assert words in f"{error} {error.hint}"
    for size in range(1, len(content) - 32, 97):
        path.write_bytes(content[:size])
        refusal(path)
