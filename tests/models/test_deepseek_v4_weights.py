"""Weights of DeepSeek-V4 read from each naming and format: the values, the memory, bad content."""

import tracemalloc

import numpy as np
import pytest
import torch

from tests import dsv4_files
from tests.dsv4_files import NVFP4_EXPERTS, WITHOUT_MTP, WRITERS, released_tensors, stacked_tensors
from tiercel.errors import ModelFormatError
from tiercel.models.footprint import weight_footprint
from tiercel.models.source import open_source
from tiercel.models.weight_planes import check_table
from tiercel.models.weights import WeightReader
from tiercel.ops.dequantize import dequantize
from tiercel.quant_types import Layout, QuantType

CPU = torch.device("cpu")
EXPECTED = stacked_tensors()
# Of the format that a file is written in, relative to the largest weight.
ROUNDING = {"F32": 0.0, "F16": 6e-4, "BF16": 5e-3, "Q8_0": 1e-2, "MXFP4": 0.0}


def reader(path):
    return WeightReader(open_source(path), CPU)


def read(weights, name):
    """A weight by our name as plain numbers, of whichever kind."""
    stored = weights.source.stored[name]
    if stored.limit:
        return weights.integers(name)
    if len(stored.shape) == 1:
        return weights.vector(name)
    if name.endswith(".weight"):
        return dequantize(weights.weight(name), torch.float32)
    return weights.floats(name)


@pytest.mark.parametrize("naming", WRITERS)
def test_every_naming_holds_the_same_weights(naming, tmp_path):
    weights = reader(WRITERS[naming](tmp_path / "model"))
    names = {n for n in EXPECTED if not (naming in WITHOUT_MTP and n.startswith("mtp."))}
    assert set(weights.source.stored) == names
    assert weights.source.config.num_mtp_layers == (naming not in WITHOUT_MTP)
    for name in names:
        assert weights.has(name)
        found, expected = read(weights, name), EXPECTED[name]
        assert found.shape == expected.shape, name
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("experts", ["F16", "Q8_0", "MXFP4"])
@pytest.mark.parametrize("matrices", ["F16", "BF16", "Q8_0"])
def test_gguf_types(matrices, experts, tmp_path):
    weights = reader(dsv4_files.write_gguf(tmp_path / "m.gguf", matrices, experts))
    kinds = {weights.source.stored[name].qtype.name for name in EXPECTED if ".experts." in name}
    assert kinds == {experts}
    for name, expected in EXPECTED.items():
        kind = weights.source.stored[name].qtype.name
        limit = ROUNDING.get(kind, 0.0) * expected.abs().max().item()
        assert (read(weights, name) - expected).abs().max().item() <= limit, name


def test_formats_stay_as_stored():
    weights = reader(dsv4_files.TINY)
    tensors = released_tensors()
    fp8 = weights.weight("layers.2.attn.wq_b.weight")
    assert (fp8.qtype, fp8.layout, fp8.shape) == (QuantType.FP8_BLOCK, Layout.BLOCKS, (384, 72))
    assert fp8.block == (128, 128)
    assert fp8.planes["q"].dtype is torch.float8_e4m3fn
    stored = tensors["layers.2.attn.wq_b.scale"].view(torch.uint8)
    assert torch.equal(fp8.planes["scale"], stored)
    stack = weights.weight("layers.1.ffn.experts.w2.weight")
    assert (stack.qtype, stack.shape) == (QuantType.MXFP4, (6, 160, 64))
    for e in range(6):
        name = f"layers.1.ffn.experts.{e}.w2"
        assert torch.equal(stack.planes["q"][e], tensors[f"{name}.weight"].view(torch.uint8))
        assert torch.equal(stack.planes["scale"][e], tensors[f"{name}.scale"].view(torch.uint8))
    plain = weights.weight("layers.1.ffn.gate.weight")
    assert (plain.qtype, plain.layout) == (QuantType.BF16, Layout.FILE)


@pytest.mark.parametrize("write", [dsv4_files.write_nvfp4, dsv4_files.write_compressed_tensors])
def test_nvfp4_experts_beside_mxfp4_ones(write, tmp_path):
    weights = reader(write(tmp_path / "model"))
    is_packed = write is dsv4_files.write_compressed_tensors
    repacked = dsv4_files.load_file(NVFP4_EXPERTS)
    for layer, qtype in ((0, "NVFP4"), (1, "MXFP4"), (2, "MXFP4"), (3, "NVFP4")):
        for part in ("w1", "w2", "w3"):
            stack = weights.weight(f"layers.{layer}.ffn.experts.{part}.weight")
            assert stack.qtype.name == qtype
            if qtype == "MXFP4":
                continue
            assert ("divisor" if is_packed else "global_scale") in stack.planes
            for e in range(6):
                name = f"layers.{layer}.ffn.experts.{e}.{part}"
                codes = repacked[f"{name}.weight"]
                assert torch.equal(stack.planes["q"][e], codes)
                factor = repacked[f"{name}.weight_scale_2"].item()
                sizes = repacked[f"{name}.weight_scale"].float().repeat_interleave(16, 1)
                codes = codes.to(torch.int64)
                pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
                expected = dsv4_files._E2M1[pairs] * sizes * factor
                found = dequantize(stack, torch.float32)[e]
                torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)


def test_fp8_experts(tmp_path):
    """One format for all experts of a layer; another layer may have another."""
    tensors = released_tensors()
    for e in range(6):
        for part in ("w1", "w2", "w3"):
            name = f"layers.2.ffn.experts.{e}.{part}"
            values = tensors[f"{name}.weight"]
            shape = (values.shape[0], 2 * values.shape[1])
            tensors[f"{name}.weight"] = torch.randn(shape).to(torch.float8_e4m3fn)
            size = (-(-shape[0] // 128), -(-shape[1] // 128))
            tensors[f"{name}.scale"] = torch.rand(size) + 0.5
    weights = reader(dsv4_files.save_folder(tmp_path / "model", tensors))
    stack = weights.weight("layers.2.ffn.experts.w1.weight")
    assert (stack.qtype, stack.shape) == (QuantType.FP8_BLOCK, (6, 64, 160))
    assert stack.planes["scale"].dtype is torch.float32
    name = "layers.2.ffn.experts.4.w1"
    assert torch.equal(stack.planes["scale"][4], tensors[f"{name}.scale"])
    q = tensors[f"{name}.weight"].view(torch.uint8)
    assert torch.equal(stack.planes["q"][4].view(torch.uint8), q)


def test_stacks_of_fp8_are_cut_at_blocks(tmp_path):
    """What transformers keeps of an FP8 checkpoint in memory, saved as it is."""
    folder = dsv4_files.write_transformers_memory(tmp_path / "model")
    tensors = dsv4_files.load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.rand(6, 4, 3)
    config = dsv4_files.transformers_config()
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 64]}
    weights = reader(dsv4_files.save_folder(folder, tensors, config))
    w1 = weights.weight("layers.1.ffn.experts.w1.weight")
    w3 = weights.weight("layers.1.ffn.experts.w3.weight")
    assert w1.shape == w3.shape == (6, 64, 160)
    assert w3.block == (32, 64)
    assert torch.equal(w1.planes["scale"], tensors[f"{name}_scale_inv"][:, :2])
    assert torch.equal(w3.planes["scale"], tensors[f"{name}_scale_inv"][:, 2:])
    q = tensors[name].view(torch.uint8)
    assert torch.equal(w3.planes["q"].view(torch.uint8), q[:, 64:])
    config["quantization_config"]["weight_block_size"] = [128, 64]
    tensors[f"{name}_scale_inv"] = torch.rand(6, 1, 3)
    dsv4_files.save_folder(folder, tensors, config)
    with pytest.raises(ModelFormatError, match="joins two weights inside a block of 128"):
        open_source(folder)


def test_a_gguf_draft_block_may_use_the_main_mix(tmp_path):
    """llama.cpp's files leave out the block's own mix of streams, and its norm may be missing."""

    def drop(tensors):
        for part in ("fn", "base", "scale"):
            del tensors[f"blk.4.nextn.hc_head_{part}.weight"]
        del tensors["blk.4.nextn.shared_head_norm.weight"]
        tensors["blk.4.nextn.embed_tokens.weight"] = tensors["token_embd.weight"]

    weights = reader(dsv4_files.write_gguf(tmp_path / "m.gguf", change=drop))
    assert torch.equal(weights.floats("mtp.0.hc_head_fn"), EXPECTED["hc_head_fn"])
    assert torch.equal(weights.vector("mtp.0.norm.weight"), EXPECTED["norm.weight"])
    assert "mtp.0.hc_head_base" in weights.source.stored


def test_gguf_halves_of_the_draft_projection(tmp_path):
    def split(tensors):
        both, kind = tensors.pop("blk.4.nextn.eh_proj.weight")
        width = both.shape[0]
        tensors["blk.4.nextn.e_proj.weight"] = np.ascontiguousarray(both[:, :width]), kind
        tensors["blk.4.nextn.h_proj.weight"] = np.ascontiguousarray(both[:, width:]), kind

    weights = reader(dsv4_files.write_gguf(tmp_path / "m.gguf", change=split))
    for name in ("mtp.0.e_proj.weight", "mtp.0.h_proj.weight"):
        assert torch.equal(read(weights, name), EXPECTED[name])


def test_progress_reaches_the_end():
    seen = []
    source = open_source(dsv4_files.TINY)
    weights = WeightReader(source, CPU, lambda done, total: seen.append((done, total)))
    for name in source.stored:
        read(weights, name)
    assert seen[-1][0] == seen[-1][1] == sum(info.nbytes for info in source.tensors.values())


# --- Memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_draft_head", [False, True])
@pytest.mark.parametrize("naming", ["released", "gguf_mxfp4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_is_what_reading_makes(dtype, naming, has_draft_head, tmp_path):
    """Block formats as stored, floats of matrices in the dtype, everything else in float32."""
    weights = reader(WRITERS[naming](tmp_path / "model"))
    dense = getattr(torch, dtype)
    planned = weight_footprint(weights.source, dtype, "cuda", has_draft_head=has_draft_head)
    total = 0
    for name, stored in weights.source.stored.items():
        if name.startswith("mtp.") and not has_draft_head:
            continue
        if stored.limit or len(stored.shape) == 1 or not name.endswith(".weight"):
            total += read(weights, name).nbytes
        elif name == "embed.weight" or not stored.qtype.is_float:
            total += weights.weight(name).nbytes
        else:
            total += dequantize(weights.weight(name), dense).nbytes
    assert planned.nbytes == total
    assert planned.forms["MXFP4"] == sum(
        weights.source.stored[name].nbytes
        for name in weights.source.stored
        if ".experts." in name and (has_draft_head or not name.startswith("mtp."))
    )


@pytest.mark.usefixtures("without_native")
def test_packed_matrices_of_gguf_files_rest_as_those_of_dense_decoders(tmp_path):
    source = open_source(dsv4_files.write_gguf(tmp_path / "m.gguf", "Q8_0", "Q8_0"))
    forms = weight_footprint(source, "bfloat16", "cpu").forms
    assert forms["pairs of 4-bit planes"] > 0
    stacks = [w.nbytes for n, w in source.stored.items() if ".experts." in n and "mtp" not in n]
    assert forms["Q8_0"] == sum(stacks)


@pytest.mark.parametrize("naming", ["released", "transformers_memory", "gguf_mxfp4"])
def test_reading_a_stack_takes_its_size_and_one_tensor(naming, tmp_path, monkeypatch):
    """Memory of PyTorch by what it allocates, memory of numpy by tracemalloc."""
    weights = reader(WRITERS[naming](tmp_path / "model"))
    allocated = []
    empty = torch.empty

    def counted(*args, **kwargs):
        out = empty(*args, **kwargs)
        allocated.append(out.numel() * out.element_size())
        return out

    monkeypatch.setattr(torch, "empty", counted)
    name = "layers.1.ffn.experts.w1.weight"
    largest = max(weights.source.tensors[n].nbytes for n in _tensors_of(weights.source, name))
    tracemalloc.start()
    stack = weights.weight(name)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(allocated) == stack.nbytes
    if naming == "gguf_mxfp4":
        largest //= 2  # of six experts: nibbles of one, halves, and their join
    assert peak <= largest + 64 * 1024


def _tensors_of(source, name):
    return [n for names in source.stored[name].planes.values() for n in names]


class Uploader:
    """What `WeightReader` hands to the uploader of a GPU, checked: it copies on the CPU."""

    def __init__(self, largest):
        self.largest = largest

    def __call__(self, data):
        out = torch.empty_like(data)
        self.fill(data, out)
        return out

    def fill(self, data, out):
        assert data.dtype == out.dtype == torch.uint8
        assert data.is_contiguous()
        assert out.is_contiguous()
        assert data.shape == out.shape
        assert data.numel() <= self.largest
        out.copy_(data)


@pytest.mark.parametrize("naming", ["released", "transformers_memory", "gguf_f32", "gguf_mxfp4"])
def test_a_gpu_is_filled_matrix_by_matrix(naming, tmp_path):
    """Pieces are whole matrices, contiguous, never a stack."""
    path = WRITERS[naming](tmp_path / "model")
    plain, piecewise = reader(path), reader(path)
    for name, stored in plain.source.stored.items():
        if stored.limit or not name.endswith(".weight"):
            continue
        expected = plain.weight(name)
        matrices = stored.shape[0] if len(stored.shape) == 3 else 1
        piecewise._uploader = Uploader(expected.nbytes // matrices)
        found = piecewise.weight(name)
        assert (found.qtype, found.layout, found.shape) == (
            expected.qtype,
            expected.layout,
            expected.shape,
        )
        for key, plane in expected.planes.items():
            assert torch.equal(found.planes[key].view(torch.uint8), plane.view(torch.uint8)), name


@pytest.mark.gpu
@pytest.mark.parametrize("naming", ["released", "transformers_memory", "gguf_mxfp4"])
def test_a_gpu_has_what_a_cpu_has(naming, tmp_path, device):
    path = WRITERS[naming](tmp_path / "model")
    weights, on_gpu = reader(path), WeightReader(open_source(path), device)
    for name in weights.source.stored:
        assert torch.equal(read(on_gpu, name).cpu(), read(weights, name)), name


# --- Content -----------------------------------------------------------------------------------


def spoiled(folder, name, edit, write=dsv4_files.write_released):
    """A folder in which `edit` has changed the bytes of a tensor."""
    write(folder)
    tensors = dsv4_files.load_file(folder / "model.safetensors")
    bits = tensors[name].clone()
    edit(bits.view(torch.uint8) if bits.element_size() == 1 else bits)
    return dsv4_files.save_folder(folder, tensors | {name: bits})


def set_at(*index, value):
    def edit(bits):
        bits[index] = value

    return edit


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("layers.2.attn.wo_b.scale", "layers.2.attn.wo_b.weight"),
        ("layers.1.ffn.experts.4.w2.scale", "layers.1.ffn.experts.w2.weight"),
        ("mtp.0.ffn.experts.0.w3.scale", "mtp.0.ffn.experts.w3.weight"),
    ],
)
def test_e8m0_255_is_refused(name, weight, tmp_path):
    folder = spoiled(tmp_path / "model", name, set_at(1, 0, value=255))
    with pytest.raises(ModelFormatError, match=r"E8M0 byte 255.* first in row 1") as caught:
        reader(folder).weight(weight)
    assert name in str(caught.value)
    assert str(caught.value).startswith("model: ")


def test_e8m0_255_in_a_gguf_block_is_refused(tmp_path):
    path = dsv4_files.write_gguf_mxfp4(tmp_path / "m.gguf")
    info = open_source(path).tensors["blk.1.ffn_up_exps.weight"]
    data = bytearray(path.read_bytes())
    data[info.offset + 17 * 5 * 3] = 255  # row 3 of rows of 5 blocks
    path.write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"blk\.1\.ffn_up_exps.*first in row 3"):
        reader(path).weight("layers.1.ffn.experts.w3.weight")


@pytest.mark.parametrize("value", [0x7F, 0xFF])
def test_nan_scales_of_nvfp4_are_refused(value, tmp_path):
    name = "layers.3.ffn.experts.5.w1.weight_scale"
    edit = set_at(2, 1, value=value)
    folder = spoiled(tmp_path / "model", name, edit, dsv4_files.write_nvfp4)
    with pytest.raises(ModelFormatError, match="NaN, first in row 2") as caught:
        reader(folder).weight("layers.3.ffn.experts.w1.weight")
    assert name in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_of_float32_must_be_finite(value, tmp_path):
    name = "layers.0.attn.wq_a.weight_scale_inv"
    edit = set_at(0, 1, value=value)
    folder = spoiled(tmp_path / "model", name, edit, dsv4_files.write_scale_inv)
    with pytest.raises(ModelFormatError, match="NaN or infinity"):
        reader(folder).weight("layers.0.attn.wq_a.weight")


def test_a_divisor_of_0_is_refused(tmp_path):
    name = "layers.0.ffn.experts.1.w1.weight_global_scale"
    edit = set_at(0, value=0.0)
    folder = spoiled(tmp_path / "model", name, edit, dsv4_files.write_compressed_tensors)
    with pytest.raises(ModelFormatError, match="0, which divides"):
        reader(folder).weight("layers.0.ffn.experts.w1.weight")


@pytest.mark.parametrize(
    ("value", "rule"),
    [(6, "must be 0 to 5"), (-1, "must be 0 to 5"), (None, "must be another one")],
)
def test_the_table_of_hash_layers_is_checked(value, rule, tmp_path):
    name = "layers.1.ffn.gate.tid2eid"
    other = released_tensors()[name][100, 0].item() if value is None else value
    folder = spoiled(tmp_path / "model", name, set_at(100, 1, value=other))
    with pytest.raises(ModelFormatError) as caught:
        reader(folder).integers(name)
    assert name in str(caught.value)
    assert "in row 100" in str(caught.value)
    assert rule in caught.value.hint


def test_a_table_of_one_expert_cannot_repeat():
    check_table(np.zeros((3, 1), np.int64), 1, "t", "f")
