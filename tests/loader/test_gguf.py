"""The GGUF reader on valid files, compared with the `gguf` package and the test writer."""

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.gguf_files import (
    ARRAY,
    BOOL,
    ENCODERS,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    TYPE_IDS,
    U8,
    U16,
    U32,
    U64,
    Stored,
    Typed,
    assemble,
    pair,
    quantised,
    record,
    tiny_model,
    write_gguf,
)
from tiercel.errors import ModelFormatError, ModelNotFoundError
from tiercel.loader.gguf import read_gguf
from tiercel.quant_types import QuantType

DATA = Path(__file__).parents[1] / "data" / "gguf"
CASES = ["qwen3-tiny", "llama-tiny", "gemma3-tiny"]


def check_against_package(path):
    """Every field and every tensor of a file equals the official package's."""
    mine, theirs = read_gguf(path), gguf.GGUFReader(path)
    expected = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(mine.metadata) == list(expected)
    for key, field in expected.items():
        value = mine.metadata[key]
        if isinstance(value, np.ndarray):
            value = value.tolist()
        assert value == field.contents(), key
    assert list(mine.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = mine.tensors[tensor.name]
        assert info.dims == tuple(tensor.shape.tolist())
        assert info.qtype.ggml_id == tensor.tensor_type
        assert (info.nbytes, info.offset) == (tensor.n_bytes, tensor.data_offset)
        assert mine.data(info.name).tobytes() == tensor.data.tobytes()
    return mine


@pytest.mark.parametrize("case", CASES)
def test_cases_match_the_gguf_package(case):
    path = DATA / f"{case}.gguf"
    file = check_against_package(path)
    assert file.size_bytes == path.stat().st_size
    assert file.notes == ()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_tiny_models_match_the_gguf_package(arch, tmp_path):
    file = check_against_package(tiny_model(tmp_path / "tiny.gguf", arch))
    assert file.metadata["general.architecture"] == arch
    assert file.tensors["token_embd.weight"].shape == (300, 64)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 65536])
def test_every_type_in_odd_shapes(version, alignment, tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        f"{name}.{rows}": quantised(rng.normal(size=(rows, 3 * weights)), name)
        for name, (_, weights) in ENCODERS.items()
        for rows in (1, 5)
    }
    path = write_gguf(tmp_path / "x.gguf", {}, tensors, version=version, alignment=alignment)
    file = read_gguf(path)
    assert (file.version, file.alignment) == (version, alignment)
    for name, stored in tensors.items():
        info, data = file.tensors[name], file.data(name)
        assert info.qtype is QuantType[name.partition(".")[0]]
        assert info.shape == stored.dims[::-1]
        assert info.nbytes == len(stored.data)
        assert info.offset % alignment == 0
        assert data.shape == (info.shape[0], info.qtype.row_bytes(info.shape[1]))
        assert data.tobytes() == stored.data


def test_shape_folds_leading_axes_into_rows(tmp_path):
    shapes = {"vector": (6,), "matrix": (5, 6), "rank3": (4, 5, 6), "rank4": (3, 4, 5, 6)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    file = read_gguf(write_gguf(tmp_path / "x.gguf", {}, tensors))
    found = {name: info.shape for name, info in file.tensors.items()}
    assert found == {"vector": (1, 6), "matrix": (5, 6), "rank3": (20, 6), "rank4": (60, 6)}
    assert file.tensors["rank3"].dims == (6, 5, 4)


def test_scalars_keep_value_and_python_type(tmp_path):
    values = {
        "u8": Typed(U8, 255),
        "i8": Typed(I8, -128),
        "u16": Typed(U16, 65535),
        "i16": Typed(I16, -32768),
        "u32": Typed(U32, 2**32 - 1),
        "i32": Typed(I32, -(2**31)),
        "u64": Typed(U64, 2**64 - 1),
        "i64": Typed(I64, -(2**63)),
        "f32": Typed(F32, 0.1),
        "f64": Typed(F64, 0.1),
        "yes": Typed(BOOL, True),
        "no": Typed(BOOL, False),
        "text": Typed(STRING, "naïve\n你好 😀"),
        "empty": Typed(STRING, ""),
    }
    metadata = read_gguf(write_gguf(tmp_path / "x.gguf", values, {})).metadata
    expected = {key: typed.value for key, typed in values.items()}
    expected["f32"] = float(np.float32(0.1))
    assert metadata == expected
    for key, value in metadata.items():
        assert type(value) is type(expected[key]), key


@pytest.mark.parametrize(
    ("kind", "items", "dtype"),
    [
        (U8, [0, 255], "<u1"),
        (I8, [-128, 127], "<i1"),
        (U16, [65535, 1], "<u2"),
        (I16, [-32768], "<i2"),
        (U32, [2**32 - 1, 0, 3], "<u4"),
        (I32, [-(2**31)], "<i4"),
        (U64, [2**64 - 1], "<u8"),
        (I64, [-(2**63)], "<i8"),
        (F32, [0.5, float("inf")], "<f4"),
        (F64, [0.1], "<f8"),
        (BOOL, [True, False, True], "|b1"),
        (F32, [], "<f4"),
    ],
)
def test_numeric_arrays_are_read_only_views(kind, items, dtype, tmp_path):
    # "k" puts the array on an odd byte: views must not need alignment.
    pairs = {"k": Typed(ARRAY, items, of=kind)}
    value = read_gguf(write_gguf(tmp_path / "x.gguf", pairs, {})).metadata["k"]
    assert isinstance(value, np.ndarray)
    assert value.dtype == np.dtype(dtype)
    assert value.tolist() == items
    assert not value.flags.writeable
    assert not value.flags.owndata


def test_strings_in_arrays_keep_their_bytes(tmp_path):
    texts = [
        b"",
        b"plain",
        "Ġthe 你好 😀".encode(),
        b"\xff\xfe",
        b"\xe4\xbd",
        b"\xed\xa0\x80",
        b"\0",
    ]
    pairs = {"texts": texts, "after": 7, "none": Typed(ARRAY, [], of=STRING)}
    metadata = read_gguf(write_gguf(tmp_path / "x.gguf", pairs, {})).metadata
    assert [t.encode("utf-8", "surrogateescape") for t in metadata["texts"]] == texts
    assert metadata["after"] == 7
    assert metadata["none"] == []


def test_large_vocabulary(tmp_path):
    texts = [f"token{i}" * (i % 4) for i in range(262_144)]
    path = tmp_path / "x.gguf"
    packed = b"".join(struct.pack("<Q", len(t)) + t.encode() for t in texts)
    head = struct.pack("<Q", 6) + b"tokens" + struct.pack("<IIQ", ARRAY, STRING, len(texts))
    path.write_bytes(assemble([head + packed, pair("after", 1)]))
    metadata = read_gguf(path).metadata
    assert metadata["tokens"] == texts
    assert metadata["after"] == 1


def test_data_is_a_read_only_view_of_the_map(tmp_path):
    file = read_gguf(tiny_model(tmp_path / "x.gguf"))
    data = file.data("token_embd.weight")
    assert not data.flags.writeable
    assert not data.flags.owndata
    with pytest.raises(KeyError):
        file.data("nothing")


def test_trailing_bytes_are_noted_from_one_alignment_on(tmp_path):
    path = tiny_model(tmp_path / "x.gguf")
    content = path.read_bytes()
    path.write_bytes(content + bytes(32))
    assert read_gguf(path).notes == ()
    path.write_bytes(content + bytes(33))
    assert read_gguf(path).notes == ("x.gguf: 33 bytes follow the last tensor.",)


def test_tensors_may_lie_in_any_order_with_gaps(tmp_path):
    records = [record("late", (8,), 0, 96), record("early", (8,), 0, 0)]
    data = np.arange(32, dtype="<f4").tobytes()
    path = tmp_path / "x.gguf"
    path.write_bytes(assemble([], records, data))
    file = read_gguf(path)
    assert file.data("late").view("<f4").tolist() == [list(range(24, 32))]
    assert file.data("early").view("<f4").tolist() == [list(range(8))]


def test_metadata_alone_is_a_file(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(assemble([pair("general.name", "vocabulary only")], alignment=1))
    file = read_gguf(path)
    assert file.tensors == {}
    assert file.metadata == {"general.name": "vocabulary only"}


# --- Split files -------------------------------------------------------------------------------


def write_split(folder, count=3, **changes):
    """Parts of one tensor each; `changes` replaces metadata of the last part."""
    for index in range(count):
        pairs = {"split.no": Typed(U16, index), "split.count": Typed(U16, count)}
        if index == 0:
            pairs |= {"general.name": "set", "split.tensors.count": Typed(I32, count)}
        if index == count - 1:
            pairs |= {key.replace("__", "."): value for key, value in changes.items()}
        values = np.full((2, 8), index, np.float32)
        name = f"set-{index + 1:05}-of-{count:05}.gguf"
        # Parts differ in alignment: offsets count from each part's own data.
        alignment = 32 << index
        write_gguf(folder / name, pairs, {f"t{index}": values}, alignment=alignment)
    return folder / f"set-00001-of-{count:05}.gguf"


@pytest.mark.parametrize("given", [1, 2, 3])
def test_split_files_are_merged_from_any_part(given, tmp_path):
    first = write_split(tmp_path)
    file = read_gguf(tmp_path / f"set-{given:05}-of-00003.gguf")
    assert file.path == first
    assert file.metadata["general.name"] == "set"
    assert [info.part for info in file.tensors.values()] == [0, 1, 2]
    for index in range(3):
        assert (file.data(f"t{index}").view("<f4") == index).all()
    assert file.size_bytes == sum(p.stat().st_size for p in tmp_path.iterdir())


def test_split_with_a_missing_part(tmp_path):
    first = write_split(tmp_path)
    (tmp_path / "set-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelNotFoundError, match=r"^set-00002-of-00003\.gguf: "):
        read_gguf(first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split__no": Typed(U16, 1)}, "split.no"),
        ({"split__count": Typed(U16, 4)}, "split.count"),
        ({"split__no": "2"}, "split.no"),
    ],
)
def test_split_with_a_part_of_another_set(changes, message, tmp_path):
    with pytest.raises(ModelFormatError, match=message):
        read_gguf(write_split(tmp_path, **changes))


def test_split_with_a_tensor_twice_or_missing(tmp_path):
    first = write_split(tmp_path)
    last = tmp_path / "set-00003-of-00003.gguf"
    pairs = {"split.no": Typed(U16, 2), "split.count": Typed(U16, 3)}
    write_gguf(last, pairs, {"t0": np.zeros(8, np.float32)})
    with pytest.raises(ModelFormatError, match=r"tensor 't0' is also in set-00001"):
        read_gguf(first)
    write_gguf(last, pairs, {})
    with pytest.raises(ModelFormatError, match=r"'split.tensors.count' is 3 but the parts hold 2"):
        read_gguf(first)


# --- Paths -------------------------------------------------------------------------------------


def refused(path, kind):
    with pytest.raises(kind) as caught:
        read_gguf(path)
    text = str(caught.value)
    assert text.isprintable()
    assert caught.value.hint
    return text


@pytest.mark.parametrize(
    "name", ["none.gguf", "a/b.gguf", "x\0y.gguf", "n" * 300, "a\n\x1b[31m.gguf"]
)
def test_missing_files(name, tmp_path):
    assert len(refused(tmp_path / name, ModelNotFoundError)) < 300


def test_broken_link(tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(tmp_path / "nothing")
    assert refused(link, ModelNotFoundError).startswith("link.gguf: ")


def test_link_to_a_file_is_followed(tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(tiny_model(tmp_path / "x.gguf"))
    assert read_gguf(link).tensors


def test_folder(tmp_path):
    assert "a folder" in refused(tmp_path, ModelFormatError)


def test_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "a pipe" in refused(tmp_path / "pipe.gguf", ModelFormatError)


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_device(device):
    assert "a device" in refused(Path(device), ModelFormatError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission(tmp_path):
    path = tiny_model(tmp_path / "x.gguf")
    path.chmod(0)
    assert "may not read" in refused(path, ModelNotFoundError)


def test_permission_error_is_worded(tmp_path, monkeypatch):
    def deny(*_):
        raise PermissionError(13, "Permission denied")

    path = tiny_model(tmp_path / "x.gguf")
    monkeypatch.setattr(os, "open", deny)
    assert refused(path, ModelNotFoundError) == "x.gguf: this user may not read the file."


def test_stored_helper_writes_what_the_package_reads(tmp_path):
    """The test writer itself: a wrong writer would make every other test worthless."""
    data = np.arange(2 * 18, dtype=np.uint8).tobytes()
    tensors = {"q": Stored((32, 2), TYPE_IDS["Q4_0"], data), "v": np.ones(3, np.float32)}
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}, tensors)
    theirs = gguf.GGUFReader(path)
    assert [t.data.tobytes() for t in theirs.tensors] == [data, np.ones(3, "<f4").tobytes()]


@pytest.mark.parametrize("name", ENCODERS)
def test_stacks_of_every_type(name, tmp_path):
    """Experts: dims are (in, out, experts), and the rows of all experts are end to end."""
    block = ENCODERS[name][1]
    values = np.random.default_rng(0).normal(size=(3, 5, 2 * block))
    file = read_gguf(write_gguf(tmp_path / "x.gguf", {}, {"w": quantised(values, name)}))
    info, data = file.tensors["w"], file.data("w")
    assert info.dims == (2 * block, 5, 3)
    assert info.stack_shape == (3, 5, 2 * block)
    assert info.shape == (15, 2 * block)
    alone = quantised(values[1], name)
    assert data[5:10].tobytes() == alone.data
    assert data.shape == (15, info.qtype.row_bytes(2 * block))


def test_a_table_of_integers(tmp_path):
    table = np.array([[1, -2], [2**31 - 1, -(2**31)], [5, 6]], "<i4")
    stored = Stored((2, 3), 26, table.tobytes())
    file = read_gguf(write_gguf(tmp_path / "x.gguf", {}, {"tid2eid": stored}))
    info = file.tensors["tid2eid"]
    assert (info.qtype.name, info.stack_shape, info.nbytes) == ("I32", (1, 3, 2), 24)
    assert np.array_equal(file.data("tid2eid").view("<i4"), table)
