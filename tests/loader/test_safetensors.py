"""The safetensors reader: valid files of the official package, and hostile files."""

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tiercel.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from tiercel.loader.safetensors import DTYPES, INDEX_NAME, read_safetensors
from tiercel.quant_types import QuantType

ALLOWED = (ModelFormatError, UnsupportedModelError)


def sample():
    """Tensors of every float type, every rank, odd sizes."""
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(5, 7, generator=generator),
        "half": torch.randn(3, 9, generator=generator).half(),
        "brain": torch.randn(11, generator=generator).bfloat16(),
        "experts": torch.randn(2, 3, 4, generator=generator),
        "scalar": torch.tensor(2.5),
    }


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(2, 4), offsets=(0, 32)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refusal(folder, kind=ALLOWED):
    with pytest.raises(kind) as caught:
        read_safetensors(folder)
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 400
    assert caught.value.hint.endswith(".")
    return text


def check_sample(file, tensors):
    assert set(file.tensors) == set(tensors)
    for name, tensor in tensors.items():
        info, data = file.tensors[name], file.data(name)
        assert info.dims == tuple(reversed(tensor.shape)) or (1,)
        assert data.shape == (info.shape[0], info.shape[1] * tensor.element_size())
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert data.tobytes() == flat.numpy().tobytes()
        assert not data.flags.writeable


def test_single_file(tmp_path):
    save_file(sample(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = read_safetensors(tmp_path)
    check_sample(file, sample())
    assert file.tensors["experts"].shape == (6, 4)
    assert file.tensors["scalar"].shape == (1, 1)
    assert file.tensors["brain"].qtype is QuantType.BF16
    assert file.size_bytes == (tmp_path / "model.safetensors").stat().st_size
    check_sample(read_safetensors(tmp_path / "model.safetensors"), sample())


def plane_sample():
    """Planes of block formats and tables of integers, of the released dtypes."""
    generator = torch.Generator().manual_seed(0)

    def octets(*shape):
        return torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)

    return {
        "a.weight": octets(5, 7).view(torch.float8_e4m3fn),
        "a.scale": octets(1, 1).view(torch.float8_e8m0fnu),
        "b.weight": octets(3, 16).view(torch.int8),
        "c.weight": octets(3, 8),
        "c.weight_scale_2": torch.tensor(0.25),
        "tid2eid": torch.randint(-(2**40), 2**40, (11, 2), generator=generator),
        "table": torch.randint(-(2**30), 2**30, (13,), generator=generator).int(),
    }


def test_planes_and_integers(tmp_path):
    save_file(plane_sample(), tmp_path / "model.safetensors")
    file = read_safetensors(tmp_path)
    check_sample(file, plane_sample())
    types = {name: info.qtype.name for name, info in file.tensors.items()}
    assert types == {
        "a.weight": "F8_E4M3", "a.scale": "F8_E8M0", "b.weight": "I8", "c.weight": "U8",
        "c.weight_scale_2": "F32", "tid2eid": "I64", "table": "I32",
    }  # fmt: skip
    assert file.tensors["c.weight_scale_2"].stack_shape == (1, 1, 1)
    assert file.tensors["table"].stack_shape == (1, 1, 13)
    assert file.data("tid2eid").view("<i8").shape == (11, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", [-1, 1])
def test_bytes_of_every_dtype_are_those_of_its_shape(dtype, change, tmp_path):
    size = 6 * DTYPES[dtype].block_bytes
    header = {"a": entry(dtype, (2, 3), (0, size + change))}
    write(tmp_path / "model.safetensors", header, bytes(size + change))
    text = refusal(tmp_path, ModelFormatError)
    assert f"span {size + change} bytes but {dtype} of shape [2, 3] has {size}" in text
    header = {"a": entry(dtype, (2, 3), (0, size))}
    write(tmp_path / "model.safetensors", header, bytes(size - 1))
    assert f"claims {size} bytes" in refusal(tmp_path, ModelFormatError)


def write_shards(folder, **changes):
    tensors = sample()
    weight_map = {
        name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)
    }
    for shard in set(weight_map.values()):
        part = {name: tensors[name] for name in tensors if weight_map[name] == shard}
        save_file(part, folder / shard)
    weight_map |= changes
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    return tensors


def test_shards(tmp_path):
    tensors = write_shards(tmp_path)
    file = read_safetensors(tmp_path)
    check_sample(file, tensors)
    assert len(file.parts) == 2


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "..",
        ".hidden.safetensors", "x.bin", "", 7, None, "x\0.safetensors",
    ],
)  # fmt: skip
def test_index_names_only_siblings(shard, tmp_path):
    write_shards(tmp_path, matrix=shard)
    assert "'matrix'" in refusal(tmp_path, ModelFormatError)


def test_index_and_shards_must_agree(tmp_path):
    write_shards(tmp_path, more="model-00001-of-00002.safetensors")
    assert "'more'" in refusal(tmp_path)
    write_shards(tmp_path, matrix="model-00002-of-00002.safetensors")
    assert "not listed" in refusal(tmp_path)
    write_shards(tmp_path, matrix="model-00003-of-00003.safetensors")
    assert "model-00003" in refusal(tmp_path, ModelNotFoundError)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "nonsense", '{"weight_map": []}', '{"weight_map": {}}', "[" * 200_000]
)
def test_broken_index(text, tmp_path):
    (tmp_path / INDEX_NAME).write_text(text)
    assert refusal(tmp_path).startswith(INDEX_NAME)


def test_pickles_are_refused_by_name(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert refusal(tmp_path, UnsupportedModelError).startswith("pytorch_model.bin: ")
    for name in ("model.pt", "model.pth", "model.ckpt"):
        assert "pickle" in refusal(tmp_path / name, UnsupportedModelError)


def test_nothing_there(tmp_path):
    refusal(tmp_path, ModelNotFoundError)
    refusal(tmp_path / "none", ModelNotFoundError)
    refusal(tmp_path / ("n" * 300), ModelNotFoundError)
    refusal(tmp_path / "x\0y", ModelNotFoundError)
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "nothing")
    refusal(tmp_path, ModelNotFoundError)


@pytest.mark.parametrize("dtype", ["F64", "I16", "U32", "F8_E5M2", "BOOL", "nonsense", 7, None])
def test_other_dtypes_are_named(dtype, tmp_path):
    write(tmp_path / "model.safetensors", {"a": entry(dtype)}, bytes(32))
    text = refusal(tmp_path, UnsupportedModelError)
    assert "'a'" in text
    assert repr(dtype) in text


GOOD = {"a": entry()}
HOSTILE = {
    "length_2_63": (GOOD, 2**63),
    "length_max": (GOOD, 2**64 - 1),
    "length_past_end": (GOOD, 200),
    "length_too_short": (GOOD, 20),
    "length_0": (GOOD, 0),
    "not_json": (b"nonsense", None),
    "not_utf8": (b'{"\xff": 1}', None),
    "utf16": ('{"a": 1}'.encode("utf-16"), None),
    "list": ([], None),
    "nested": (b"[" * 100_000, None),
    "nested_value": (b'{"a":' * 100_000, None),
    "duplicate": (b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2), None),
    "nan": (b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 32]}}', None),
    "digits": (b'{"a": {"dtype":"F32","shape":[%b],"data_offsets":[0,32]}}' % (b"9" * 9999), None),
    "many_items": (b"[" + b"0," * (1 << 20) + b"0,0]", None),
    "entry_list": ({"a": []}, None),
    "entry_without_shape": ({"a": {"dtype": "F32", "data_offsets": [0, 32]}}, None),
    "overlap": ({"a": entry(), "b": entry(offsets=(16, 48))}, None),
    "overlap_that_adds_up": (
        {"a": entry(shape=(4,), offsets=(0, 16)), "b": entry(shape=(4,), offsets=(8, 24))},
        None,
    ),
    "same_place": ({"a": entry(), "b": entry()}, None),
    "gap_before": ({"a": entry(shape=(1, 4), offsets=(16, 32))}, None),
    "gap_between": (
        {"a": entry(shape=(3,), offsets=(0, 12)), "b": entry(shape=(4,), offsets=(16, 32))},
        None,
    ),
    "gap_after": ({"a": entry(shape=(1, 4), offsets=(0, 16))}, None),
    "nothing_covers_the_data": ({}, None),
    "product_mismatch": ({"a": entry(shape=(2, 5))}, None),
    "product_wraps": ({"a": entry(shape=(2**32, 2**32))}, None),
    "offsets_shorter": ({"a": entry(shape=(8,), offsets=(0, 28))}, None),
    "offsets_longer": ({"a": entry(shape=(7,), offsets=(0, 32))}, None),
    "past_end": ({"a": entry(shape=(2, 8), offsets=(0, 64))}, None),
    "offsets_reversed": ({"a": entry(offsets=(32, 0))}, None),
    "offsets_negative": ({"a": entry(offsets=(-32, 0))}, None),
    "offsets_three": ({"a": entry(offsets=(0, 16, 32))}, None),
    "offsets_float": ({"a": entry(offsets=(0, 32.0))}, None),
    "offsets_text": ({"a": {**entry(), "data_offsets": "032"}}, None),
    "dimension_0": ({"a": entry(shape=(0, 4), offsets=(0, 0))}, None),
    "dimension_negative": ({"a": entry(shape=(-2, -4))}, None),
    "dimension_bool": ({"a": entry(shape=(True, 8))}, None),
    "dimension_text": ({"a": entry(shape=("8",))}, None),
    "rank_5": ({"a": entry(shape=(1, 1, 1, 2, 4))}, None),
}


@pytest.mark.reliability
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header(name, tmp_path):
    header, length = HOSTILE[name]
    write(tmp_path / "model.safetensors", header, bytes(32), length)
    assert refusal(tmp_path).startswith("model.safetensors: ")


@pytest.mark.reliability
def test_cut_at_every_byte(tmp_path):
    save_file(sample(), tmp_path / "sound.safetensors")
    content = (tmp_path / "sound.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        refusal(tmp_path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A valid file's bytes, and the folder where its mutations are written."""
    folder = tmp_path_factory.mktemp("mutations")
    save_file(sample(), folder / "sound.safetensors")
    return (folder / "sound.safetensors").read_bytes(), folder


@pytest.mark.reliability
@settings(max_examples=150, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, 480), st.binary(min_size=1, max_size=3)), max_size=4)
)
def test_overwritten_bytes_load_or_are_refused(sound, edits):
    content, folder = sound
    changed = bytearray(content)
    for at, data in edits:
        changed[at : at + len(data)] = data
    (folder / "model.safetensors").write_bytes(changed)
    try:
        file = read_safetensors(folder)
    except ALLOWED:
        refusal(folder)
        return
    for name, info in file.tensors.items():
        assert np.asarray(file.data(name)).nbytes == info.nbytes
