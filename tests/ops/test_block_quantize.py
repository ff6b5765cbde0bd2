"""Block formats of DeepSeek-V4: the bytes of the reference, the oracle, and bad arguments."""

import pytest
import torch

from tests.dsv4_cases import captured, case, poison, strided
from tiercel.errors import ArgumentError
from tiercel.ops import block_quantize as op
from tiercel.ops.block_quantize import BlockFormat, QuantBlocks, block_dequantize, block_quantize
from tiercel.reference import block_quantize as oracle

SHAPES = [(1, 32), (133, 160), (3, 96), (200, 352), (129, 32)]  # rows, columns


def make_weight(rows, cols, device):
    """Columns of very different sizes, and a group of zeros."""
    weight = torch.randn(rows, cols) * torch.logspace(-3, 2, cols)
    weight[1:2, :32] = 0.0
    return weight.to(device)


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def test_fp8_blocks_match_the_reference(device):
    data = case("codec", device)
    blocks = block_quantize(data["w"], BlockFormat.FP8)
    assert torch.equal(as_bytes(blocks.q), as_bytes(data["fp8.q"]))
    assert torch.equal(blocks.scale, data["fp8.scale"])
    stored = QuantBlocks(BlockFormat.FP8, data["fp8.q"], data["fp8.scale"])
    assert torch.equal(block_dequantize(stored), data["fp8.deq"])


def test_mxfp4_matches_the_reference(device):
    data = case("codec", device)
    blocks = block_quantize(data["w"][:20], BlockFormat.MXFP4)
    assert torch.equal(blocks.q, data["mxfp4.q"])
    assert torch.equal(blocks.scale, data["mxfp4.scale"])
    stored = QuantBlocks(BlockFormat.MXFP4, data["mxfp4.q"], data["mxfp4.scale"])
    assert torch.equal(block_dequantize(stored), data["mxfp4.deq"])


def test_nvfp4_matches_the_reference(device):
    data = case("codec", device)
    blocks = block_quantize(data["w"][:20], BlockFormat.NVFP4)
    assert torch.equal(blocks.q, data["nvfp4.q"])
    assert torch.equal(as_bytes(blocks.scale), as_bytes(data["nvfp4.scale"]))
    assert torch.equal(blocks.global_scale, data["nvfp4.scale_2"])
    planes = (data["nvfp4.q"], data["nvfp4.scale"], data["nvfp4.scale_2"])
    assert torch.equal(block_dequantize(QuantBlocks(BlockFormat.NVFP4, *planes)), data["nvfp4.deq"])
    inverse = QuantBlocks(BlockFormat.NVFP4, *planes[:2], 1 / planes[2], is_reciprocal=True)
    torch.testing.assert_close(block_dequantize(inverse), data["nvfp4.deq"], rtol=2e-7, atol=0)


def test_mxfp4_becomes_nvfp4_exactly(device):
    data = case("codec", device)
    source = QuantBlocks(BlockFormat.MXFP4, data["mxfp4.q"], data["mxfp4.scale"])
    target = op.mxfp4_to_nvfp4(source)
    assert torch.equal(target.q, data["mxfp4.q"])
    assert torch.equal(as_bytes(target.scale), as_bytes(data["mx2nv.scale"]))
    assert torch.equal(target.global_scale, data["mx2nv.scale_2"])
    assert torch.equal(block_dequantize(target), data["mxfp4.deq"])


def test_scales_of_zeros_do_not_count(device):
    weight = torch.ones(2, 64, device=device)
    weight[1, :32] = 0.0
    blocks = block_quantize(weight, BlockFormat.MXFP4)
    blocks.scale[1, 0] = 200
    assert torch.equal(block_dequantize(op.mxfp4_to_nvfp4(blocks)), weight)


def test_mxfp4_of_a_wide_range_is_refused(device):
    weight = torch.ones(2, 64, device=device)
    weight[1, 32:] = 2.0**-17  # 18 scales: just fits
    blocks = block_quantize(weight, BlockFormat.MXFP4)
    assert torch.equal(block_dequantize(op.mxfp4_to_nvfp4(blocks)), weight)
    weight[1, 32:] = 2.0**-18
    with pytest.raises(ArgumentError, match="span more than 18 powers of two"):
        op.mxfp4_to_nvfp4(block_quantize(weight, BlockFormat.MXFP4))
    with pytest.raises(ArgumentError, match="the weights are fp8"):
        op.mxfp4_to_nvfp4(block_quantize(weight, BlockFormat.FP8))


def test_e2m1_rounds_as_the_reference(device):
    data = case("codec.e2m1", device)
    assert torch.equal(op.e2m1_encode(data["in"]), data["code"])
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    values = op.e2m1_decode(codes)
    assert torch.equal(values.double().cpu(), oracle.E2M1)
    assert torch.equal(op.e2m1_encode(values), codes)  # -0 keeps its sign


def test_e2m1_matches_oracle(device):
    x = torch.cat((torch.linspace(-8, 8, 3201), 3 * torch.randn(500))).to(device)
    expected = oracle.round_e2m1(x.cpu())
    assert torch.equal(op.e2m1_decode(op.e2m1_encode(x)).double().cpu(), expected)


def test_activations_round_as_the_reference(device):
    data = case("codec.act", device)
    assert torch.equal(op.round_fp8_g128(strided(data["x"])), data["fp8_g128"])
    assert torch.equal(op.round_fp4_g32(data["x"][:, :192]), data["fp4_g32"])


@pytest.mark.parametrize("cols", [1, 31, 130, 257])
def test_activations_match_oracle(cols, device):
    x = torch.randn(3, cols, device=device) * 10
    x[1] *= 1e-7  # below the least amax of FP8
    for run, size, kind in ((op.round_fp8_g128, 128, "fp8"), (op.round_fp4_g32, 32, "fp4")):
        poison(device)
        expected, _ = oracle.round_groups(x.cpu(), size, kind)
        assert torch.equal(run(x).double().cpu(), expected)


@pytest.mark.parametrize("has_e8m0", [True, False])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("block", [(128, 128), (32, 48)])
def test_fp8_matches_oracle(rows, cols, block, has_e8m0, device):
    weight = make_weight(rows, cols, device)
    poison(device)
    blocks = block_quantize(strided(weight), BlockFormat.FP8, block=block, has_e8m0=has_e8m0)
    expected, scales = oracle.fp8_blocks(weight.cpu(), block, has_e8m0)
    out = block_dequantize(blocks).double().cpu()
    if has_e8m0:
        assert torch.equal(out, expected)
        assert torch.equal(torch.exp2(blocks.scale.cpu().double() - 127), scales)
        assert torch.equal(oracle.dequantize_fp8(as_bytes(blocks.q).cpu(), scales, block), out)
    else:
        torch.testing.assert_close(blocks.scale.double().cpu(), scales, rtol=1e-6, atol=0)
        # A quotient on the other side of a tie moves a value by one step of E4M3.
        assert ((out - expected).abs() > 1e-6 * expected.abs()).double().mean() < 1e-3
        torch.testing.assert_close(out, expected, rtol=0.13, atol=1e-3 * scales.max().item())


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_fp4_matches_oracle(rows, cols, device):
    weight = make_weight(rows, cols, device)
    poison(device)
    out = block_dequantize(block_quantize(strided(weight), BlockFormat.MXFP4)).double().cpu()
    expected, _ = oracle.round_groups(weight.cpu(), 32, "fp4")
    assert torch.equal(out, expected)
    blocks = block_quantize(strided(weight), BlockFormat.MXFP4)
    decoded = oracle.dequantize_fp4(blocks.q.cpu(), torch.exp2(blocks.scale.cpu().double() - 127))
    assert torch.equal(out, decoded)
    blocks = block_quantize(weight, BlockFormat.NVFP4)
    expected, scales, total = oracle.nvfp4_blocks(weight.cpu())
    assert torch.equal(blocks.scale.float().double().cpu(), scales)
    assert blocks.global_scale.item() == pytest.approx(total, rel=1e-6)
    out = block_dequantize(blocks).double().cpu()
    close = torch.isclose(out, expected, rtol=1e-6, atol=1e-12)
    assert (~close).double().mean() < 1e-3  # ties that float32 rounds to the other side


@pytest.mark.parametrize("block_format", BlockFormat, ids=lambda f: f.value)
def test_stacks_are_their_matrices(block_format, device):
    weight = torch.stack([make_weight(70, 96, device) * scale for scale in (1.0, 0.01, 30.0)])
    blocks = block_quantize(weight, block_format)
    assert blocks.shape == (3, 70, 96)
    index = torch.tensor([2, 0, 2], device=device)
    taken = block_dequantize(blocks.take(index), torch.bfloat16)
    for place, expert in enumerate((2, 0, 2)):
        alone = block_dequantize(block_quantize(weight[expert], block_format))
        assert torch.equal(block_dequantize(blocks)[expert], alone)
        assert torch.equal(taken[place], alone.bfloat16())


def test_zero_and_nan_weights(device):
    for block_format in BlockFormat:
        zeros = torch.zeros(5, 64, device=device)
        assert torch.equal(block_dequantize(block_quantize(zeros, block_format)), zeros)
    zeros[3, 2] = float("nan")
    out = block_dequantize(block_quantize(zeros, BlockFormat.MXFP4))
    assert out[3, :32].isnan().all()
    assert out.isnan().sum() == 32


def test_e8m0_bytes(device):
    scale = torch.tensor([[0, 1, 127, 254, 255]], dtype=torch.uint8, device=device)
    q = torch.full((1, 80), 0x22, dtype=torch.uint8, device=device)  # ones
    out = block_dequantize(QuantBlocks(BlockFormat.MXFP4, q, scale))[0, ::32].double().cpu()
    expected = torch.tensor([2.0**-127, 2.0**-126, 1.0, 2.0**127, float("nan")]).double()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_kv_entries_match_the_reference(device):
    data = case("codec.kv584", device)
    entries = op.encode_kv_entries(strided(data["in"]), 64)
    assert torch.equal(entries, data["bytes"])
    assert torch.equal(op.decode_kv_entries(strided(entries), 64), data["deq"])
    parts = op.decode_kv_entries(entries[:, :576], 64, entries[:, 576:])
    assert torch.equal(parts, data["deq"])


@pytest.mark.parametrize(("head_dim", "rotary"), [(80, 16), (96, 32), (512, 64), (642, 2)])
def test_kv_entries_match_oracle(head_dim, rotary, device):
    x = torch.randn(5, head_dim, device=device) * torch.logspace(-6, 1, 5, device=device)[:, None]
    entries = op.encode_kv_entries(x, rotary)
    assert entries.shape == (5, op.torch_ops.kv_entry_bytes(head_dim, rotary))
    expected = oracle.kv_entries(x.cpu(), rotary)
    assert torch.equal(op.decode_kv_entries(entries, rotary).double().cpu(), expected)


def test_index_keys_match_the_reference(device):
    data = case("index", device)
    rotated = op.hadamard(strided(data["key128"]))
    torch.testing.assert_close(rotated, data["key128_hadamard"], rtol=0, atol=1e-5)
    keys = op.encode_index_keys(data["key128_hadamard"])
    assert torch.equal(keys, data["key128_packed"])
    rounded = op.round_fp4_g32(data["key128_hadamard"])
    assert torch.equal(op.decode_index_keys(strided(keys)), rounded)
    assert torch.equal(op.decode_index_keys(keys[:, :64], keys[:, 64:]), rounded)
    for name in "qk":
        rounded = op.round_fp4_g32(op.hadamard(data[name]))
        torch.testing.assert_close(rounded, data[f"{name}_fp4"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 32, 128])
def test_hadamard_matches_oracle(size, device):
    x = torch.randn(3, 5, size, device=device)
    out = op.hadamard(x)
    torch.testing.assert_close(out.double().cpu(), oracle.hadamard(x.cpu()), rtol=0, atol=3e-6)
    torch.testing.assert_close(op.hadamard(out), x, rtol=0, atol=3e-6)


def test_swizzle_matches_the_reference_and_oracle(device):
    data = case("codec.swizzle", device)
    assert torch.equal(op.swizzle_scales(data["in"]), data["out"])
    scale = torch.randint(0, 256, (260, 9), dtype=torch.uint8, device=device)
    assert torch.equal(op.swizzle_scales(strided(scale)).cpu(), oracle.swizzle(scale.cpu()))


def test_no_rows(device):
    empty = torch.empty(0, 128, device=device)
    assert op.round_fp8_g128(empty).shape == (0, 128)
    assert op.encode_kv_entries(empty, 64).shape == (0, 200)
    assert op.decode_kv_entries(op.encode_kv_entries(empty, 64), 64).shape == (0, 128)
    assert op.encode_index_keys(empty).shape == (0, 68)
    assert op.decode_index_keys(op.encode_index_keys(empty)).shape == (0, 128)
    assert op.hadamard(empty).shape == (0, 128)


def test_op_names_the_bad_argument(device):
    weight = torch.randn(4, 64, device=device)
    with pytest.raises(ArgumentError, match=r"weight is \(64,\)"):
        block_quantize(weight[0], BlockFormat.FP8)
    with pytest.raises(ArgumentError, match="40 columns are not whole groups of mxfp4"):
        block_quantize(weight[:, :40], BlockFormat.MXFP4)
    with pytest.raises(ArgumentError, match=r"weight is empty, \(0, 64\)"):
        block_quantize(weight[:0], BlockFormat.NVFP4)
    with pytest.raises(ArgumentError, match=r"block is \(0, 128\)"):
        block_quantize(weight, BlockFormat.FP8, block=(0, 128))
    blocks = block_quantize(weight, BlockFormat.MXFP4)
    with pytest.raises(ArgumentError, match=r"dtype=torch.int8"):
        block_dequantize(blocks, torch.int8)
    with pytest.raises(ArgumentError, match=r"have scales \(4, 1\) torch.uint8") as error:
        block_dequantize(QuantBlocks(BlockFormat.MXFP4, blocks.q, blocks.scale[:, :1]))
    assert "(4, 2)" in error.value.hint
    with pytest.raises(ArgumentError, match=r"the weights of mxfp4 are torch.int8"):
        block_dequantize(QuantBlocks(BlockFormat.MXFP4, blocks.q.view(torch.int8), blocks.scale))
    total = torch.ones((), device=device)
    with pytest.raises(ArgumentError, match="mxfp4 with a global scale"):
        block_dequantize(QuantBlocks(BlockFormat.MXFP4, blocks.q, blocks.scale, total))
    nv = block_quantize(weight, BlockFormat.NVFP4)
    with pytest.raises(ArgumentError, match=r"the global scale is \(1,\)"):
        block_dequantize(QuantBlocks(BlockFormat.NVFP4, nv.q, nv.scale, total[None]))


def test_codecs_name_the_bad_argument(device):
    x = torch.randn(2, 100, device=device)
    with pytest.raises(ArgumentError, match="hadamard: 100 channels"):
        op.hadamard(x)
    with pytest.raises(ArgumentError, match="100 channels, 16 of them rotated"):
        op.encode_kv_entries(x, 16)
    with pytest.raises(ArgumentError, match=r"entries are torch.float32"):
        op.decode_kv_entries(x, 16)
    with pytest.raises(ArgumentError, match=r"\(2, 7\) entries"):
        op.decode_kv_entries(x[:, :7].byte(), 16)
    with pytest.raises(ArgumentError, match="encode_index_keys: 100 channels"):
        op.encode_index_keys(x)
    with pytest.raises(ArgumentError, match=r"keys are \(2, 100\) torch.uint8"):
        op.decode_index_keys(x.byte())
    with pytest.raises(ArgumentError, match=r"scale is \(2, 100\) torch.float32"):
        op.swizzle_scales(x)


@pytest.mark.gpu
def test_replay_equals_eager(device):
    x = torch.randn(7, 512, device=device)
    blocks = block_quantize(torch.randn(3, 70, 96, device=device), BlockFormat.NVFP4)
    for run in (
        lambda: op.decode_kv_entries(op.encode_kv_entries(x, 64), 64),
        lambda: op.decode_index_keys(op.encode_index_keys(op.hadamard(x))),
        lambda: block_dequantize(blocks),
    ):
        assert torch.equal(captured(run), run())
