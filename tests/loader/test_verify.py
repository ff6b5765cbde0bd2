"""The scan for NaN and infinity."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.gguf_files import ENCODERS, Stored, quantised, tiny_model, write_gguf
from tiercel.loader import verify
from tiercel.loader.gguf import read_gguf
from tiercel.loader.safetensors import read_safetensors
from tiercel.loader.verify import NonFinite, find_nonfinite
from tiercel.quant_types import QuantType

NAN, INF, NEGATIVE_INF = b"\x01\x7c", b"\x00\x7c", b"\x00\xfc"
ROWS, BLOCKS = 5, 3

# Offsets of the fp16 scales in the format, repeated here so that a wrong table is noticed.
FIELDS = [
    ("Q4_0", "d", 0), ("Q4_1", "d", 0), ("Q4_1", "m", 2), ("Q5_0", "d", 0), ("Q5_1", "d", 0),
    ("Q5_1", "m", 2), ("Q8_0", "d", 0), ("IQ4_NL", "d", 0), ("Q2_K", "d", 80), ("Q2_K", "dmin", 82),
    ("Q3_K", "d", 108), ("Q4_K", "d", 0), ("Q4_K", "dmin", 2), ("Q5_K", "d", 0),
    ("Q5_K", "dmin", 2), ("Q6_K", "d", 208), ("IQ4_XS", "d", 0), ("IQ2_XXS", "d", 0),
]  # fmt: skip


def sample(type_name):
    block = ENCODERS[type_name][1]
    return quantised(np.random.default_rng(0).normal(size=(ROWS, BLOCKS * block)), type_name)


def scan(path, stored, **others):
    return list(find_nonfinite(read_gguf(write_gguf(path, {}, {"w": stored, **others}))))


@pytest.fixture(params=[1 << 20, 1])
def chunk(request, monkeypatch):
    """One chunk for all, and chunks of about one block."""
    monkeypatch.setattr(verify, "CHUNK_BYTES", max(request.param, 256))


def test_the_scan_covers_every_type():
    floats = {qtype for qtype in QuantType if qtype.is_float} | {QuantType.F8_E4M3}
    never_in_a_file = {QuantType.FP8_BLOCK, QuantType.NVFP4}
    scanned = floats | set(verify.SCALE_FIELDS) | set(verify.SKIPPED)
    assert scanned == set(QuantType) - never_in_a_file


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_sound_models_have_no_findings(arch, tmp_path):
    file = read_gguf(tiny_model(tmp_path / "x.gguf", arch))
    assert list(find_nonfinite(file)) == []


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("bad", [NAN, INF, NEGATIVE_INF])
@pytest.mark.parametrize(("type_name", "field", "at"), FIELDS)
def test_scale_fields(type_name, field, at, bad, tmp_path):
    stored = sample(type_name)
    assert scan(tmp_path / "x.gguf", stored) == []
    block_bytes = QuantType[type_name].block_bytes
    data = bytearray(stored.data)
    for block in (7, 13):  # rows 2 and 4
        data[block * block_bytes + at : block * block_bytes + at + 2] = bad
    found = scan(tmp_path / "x.gguf", Stored(stored.dims, stored.type_id, bytes(data)))
    assert found == [NonFinite("w", field, 2, 2)]


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_float_weights(type_name, bad, tmp_path):
    values = np.random.default_rng(0).normal(size=(ROWS, 77))
    assert scan(tmp_path / "x.gguf", quantised(values, type_name)) == []
    values[3, 76] = values[4, 0] = bad
    found = scan(tmp_path / "x.gguf", quantised(values, type_name), later=np.ones(3))
    assert found == [NonFinite("w", "weight", 3, 2)]
    assert str(found[0]) == ("tensor 'w' holds 2 weights that are NaN or infinite, first in row 3.")


@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0", "Q6_K"])
def test_largest_finite_scale_is_no_finding(type_name, tmp_path):
    stored = sample(type_name)
    data = np.frombuffer(stored.data, np.uint8).reshape(-1, QuantType[type_name].block_bytes).copy()
    at = {"Q4_K": 0, "Q8_0": 0, "Q6_K": 208}[type_name]
    data[0, at : at + 2] = 0xFF, 0x7B  # 65504
    data[1, at : at + 2] = 0x01, 0x80  # the smallest negative subnormal
    assert scan(tmp_path / "x.gguf", Stored(stored.dims, stored.type_id, data.tobytes())) == []


@pytest.mark.usefixtures("chunk")
def test_progress_reaches_the_sum_of_all_tensors(tmp_path):
    file = read_gguf(tiny_model(tmp_path / "x.gguf"))
    seen = []
    list(find_nonfinite(file, seen.append))
    assert seen == sorted(set(seen))
    assert seen[-1] == sum(info.nbytes for info in file.tensors.values())


def test_safetensors_are_scanned_too(tmp_path):
    values = torch.zeros(4, 6, dtype=torch.bfloat16)
    values[1, 2] = float("inf")
    save_file({"w": values, "x": torch.ones(3)}, tmp_path / "model.safetensors")
    assert list(find_nonfinite(read_safetensors(tmp_path))) == [NonFinite("w", "weight", 1, 1)]


@pytest.mark.usefixtures("chunk")
def test_the_exponents_of_mxfp4(tmp_path):
    stored = sample("MXFP4")
    assert scan(tmp_path / "x.gguf", stored) == []
    data = bytearray(stored.data)
    data[7 * 17] = data[13 * 17] = 255
    data[2 * 17] = 254  # finite
    data[3 * 17 + 1] = 255  # two values
    found = scan(tmp_path / "x.gguf", Stored(stored.dims, stored.type_id, bytes(data)))
    assert found == [NonFinite("w", "e", 2, 2)]
    assert str(found[0]) == (
        "tensor 'w' holds 2 block scales 'e' that are NaN or infinite, first in row 2."
    )


@pytest.mark.usefixtures("chunk")
def test_bytes_of_block_formats(tmp_path):
    """All 256 of E4M3 have two NaN, of E8M0 one; integers and packed bytes have none."""
    octets = torch.arange(256, dtype=torch.uint8).view(16, 16)
    tensors = {
        "q": octets.clone().view(torch.float8_e4m3fn),
        "scale": octets.clone().view(torch.float8_e8m0fnu),
        "packed": octets,
        "signed": octets.clone().view(torch.int8),
        "ids": torch.full((3, 2), -1),
        "table": torch.full((3,), -1, dtype=torch.int32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    file = read_safetensors(tmp_path)
    seen = []
    found = sorted(find_nonfinite(file, seen.append), key=lambda item: item.tensor)
    assert found == [NonFinite("q", "weight", 7, 2), NonFinite("scale", "e", 15, 1)]
    assert seen == sorted(set(seen))
    assert seen[-1] == sum(info.nbytes for info in file.tensors.values())
