"""Block formats of DeepSeek-V4: the bytes of the reference, the oracle, and bad arguments."""

import pytest
import torch

from tests.dsv4_cases import FORMATS, blocks_of, captured, case, poison, strided
from tiercel.errors import ArgumentError
from tiercel.ops import block_quantize as op
from tiercel.ops import dequantize as dequantize_op
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.dequantize import dequantize
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
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
    blocks = block_quantize(data["w"], QuantType.FP8_BLOCK)
    assert torch.equal(as_bytes(blocks.planes["q"]), as_bytes(data["fp8.q"]))
    assert torch.equal(blocks.planes["scale"], data["fp8.scale"])
    stored = blocks_of(QuantType.FP8_BLOCK, data["fp8.q"], data["fp8.scale"])
    assert torch.equal(dequantize(stored, torch.float32), data["fp8.deq"])


def test_mxfp4_matches_the_reference(device):
    data = case("codec", device)
    blocks = block_quantize(data["w"][:20], QuantType.MXFP4)
    assert torch.equal(blocks.planes["q"], data["mxfp4.q"])
    assert torch.equal(blocks.planes["scale"], data["mxfp4.scale"])
    stored = blocks_of(QuantType.MXFP4, data["mxfp4.q"], data["mxfp4.scale"])
    assert torch.equal(dequantize(stored, torch.float32), data["mxfp4.deq"])


def test_nvfp4_matches_the_reference(device):
    data = case("codec", device)
    blocks = block_quantize(data["w"][:20], QuantType.NVFP4)
    assert torch.equal(blocks.planes["q"], data["nvfp4.q"])
    assert torch.equal(as_bytes(blocks.planes["scale"]), as_bytes(data["nvfp4.scale"]))
    assert torch.equal(blocks.planes["global_scale"], data["nvfp4.scale_2"])
    planes, total = (data["nvfp4.q"], data["nvfp4.scale"]), data["nvfp4.scale_2"]
    factor = blocks_of(QuantType.NVFP4, *planes, global_scale=total)
    assert torch.equal(dequantize(factor, torch.float32), data["nvfp4.deq"])
    inverse = blocks_of(QuantType.NVFP4, *planes, divisor=1 / total)
    out = dequantize(inverse, torch.float32)
    torch.testing.assert_close(out, data["nvfp4.deq"], rtol=2e-7, atol=0)


def test_mxfp4_becomes_nvfp4_exactly(device):
    data = case("codec", device)
    source = blocks_of(QuantType.MXFP4, data["mxfp4.q"], data["mxfp4.scale"])
    target = op.mxfp4_to_nvfp4(source)
    assert torch.equal(target.planes["q"], data["mxfp4.q"])
    assert torch.equal(as_bytes(target.planes["scale"]), as_bytes(data["mx2nv.scale"]))
    assert torch.equal(target.planes["global_scale"], data["mx2nv.scale_2"])
    assert torch.equal(dequantize(target, torch.float32), data["mxfp4.deq"])


def test_scales_of_zeros_do_not_count(device):
    weight = torch.ones(2, 64, device=device)
    weight[1, :32] = 0.0
    blocks = block_quantize(weight, QuantType.MXFP4)
    blocks.planes["scale"][1, 0] = 200
    assert torch.equal(dequantize(op.mxfp4_to_nvfp4(blocks), torch.float32), weight)


def test_mxfp4_of_a_wide_range_is_refused(device):
    weight = torch.ones(2, 64, device=device)
    weight[1, 32:] = 2.0**-17  # 18 scales: just fits
    blocks = block_quantize(weight, QuantType.MXFP4)
    assert torch.equal(dequantize(op.mxfp4_to_nvfp4(blocks), torch.float32), weight)
    weight[1, 32:] = 2.0**-18
    with pytest.raises(ArgumentError, match="span more than 18 powers of two"):
        op.mxfp4_to_nvfp4(block_quantize(weight, QuantType.MXFP4))
    with pytest.raises(ArgumentError, match="the weights are FP8_BLOCK in layout BLOCKS"):
        op.mxfp4_to_nvfp4(block_quantize(weight, QuantType.FP8_BLOCK))


def make_wide(exponents, device, *, codes=None):
    """Random MXFP4 of a row a list of exponents: a group of 32 for each."""
    scale = torch.tensor(exponents, dtype=torch.int32).add(127).to(torch.uint8)
    if codes is None:
        codes = torch.randint(0, 16, (*scale.shape, 32), dtype=torch.uint8)
    q = (codes[..., 0::2] | codes[..., 1::2] << 4).flatten(-2)
    return blocks_of(QuantType.MXFP4, q.to(device), scale.to(device))


def least_error(weight):
    """Squared error of the best NVFP4 matrix: all global and E4M3 scales are tried, in float64."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    grid = op.e2m1_decode(torch.arange(8, dtype=torch.uint8)).double()
    parts = weight.double().abs().cpu().unflatten(-1, (-1, 16)).flatten(0, -2)
    top = int(weight.abs().max().log2().ceil())
    found = []
    for power in range(top - 16, top - 4):
        values = (grid * scales[:, None] * 2.0**power).unsqueeze(-1)  # (126, 8, 1)
        errors = torch.stack(
            [((values - row).abs().amin(1) ** 2).sum(-1).min() for row in parts.unsqueeze(1)]
        )
        found.append(errors.sum())
    return float(torch.stack(found).min())


@pytest.mark.parametrize("small", [None, 1, 3, 5], ids=["any", "0.5", "1.5", "3"])
@pytest.mark.parametrize("span", [19, 20, 21, 23, 30])
def test_mxfp4_of_a_wide_range_is_rounded_as_well_as_can_be(span, small, device):
    """Nibbles of the largest group may leave room: up to 3 they can be doubled."""
    exponents = [[4, 4 - span // 2], [5 - span, 3]]
    codes = torch.randint(0, 16, (2, 2, 32), dtype=torch.uint8)
    if small is not None:
        codes[0, 0] %= small + 1
        codes[1, 1] %= 6  # at most 3, one power lower
        codes[0, 0, ::2] = small
    codes[1, 0, 5] = 7
    blocks = make_wide(exponents, device, codes=codes)
    assert op.mxfp4_span(blocks).tolist() == span
    target = op.mxfp4_to_nvfp4_rounded(blocks)
    target.check("test")
    weight = dequantize(blocks, torch.float32)
    change = (dequantize(target, torch.float32) - weight).double()
    assert float((change**2).sum()) == pytest.approx(least_error(weight), rel=1e-9)
    assert torch.equal(change[0, :32], torch.zeros(32, device=device, dtype=torch.float64))


def test_rounding_keeps_what_is_exact(device):
    """A matrix within the range has the same values, and one of zeros stays one."""
    data = case("codec", device)
    source = blocks_of(QuantType.MXFP4, data["mxfp4.q"], data["mxfp4.scale"])
    target = op.mxfp4_to_nvfp4_rounded(source)
    assert torch.equal(dequantize(target, torch.float32), data["mxfp4.deq"])
    zeros = make_wide([[-127, 100]], device, codes=torch.zeros(1, 2, 32, dtype=torch.uint8))
    for convert in (op.mxfp4_to_nvfp4, op.mxfp4_to_nvfp4_rounded):
        assert not dequantize(convert(zeros), torch.float32).any()
    assert op.mxfp4_span(zeros).tolist() == 0
    with pytest.raises(ArgumentError, match="the weights are NVFP4 in layout BLOCKS"):
        op.mxfp4_to_nvfp4_rounded(target)


def test_a_stack_is_rounded_matrix_by_matrix(device):
    matrices = [make_wide([[0, -20, 3]], device), make_wide([[-7, -7, -30]], device)]
    planes = {
        name: torch.stack([matrix.planes[name] for matrix in matrices]) for name in ("q", "scale")
    }
    stack = QuantTensor(QuantType.MXFP4, Layout.BLOCKS, (2, 1, 96), planes)
    out = dequantize(op.mxfp4_to_nvfp4_rounded(stack), torch.float32)
    for number, matrix in enumerate(matrices):
        alone = dequantize(op.mxfp4_to_nvfp4_rounded(matrix), torch.float32)
        assert torch.equal(out[number], alone)
    assert op.mxfp4_span(stack).tolist() == [24, 24]


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
    blocks = block_quantize(strided(weight), QuantType.FP8_BLOCK, block=block, has_e8m0=has_e8m0)
    expected, scales = oracle.fp8_blocks(weight.cpu(), block, has_e8m0)
    out = dequantize(blocks, torch.float32).double().cpu()
    if has_e8m0:
        assert torch.equal(out, expected)
        assert torch.equal(torch.exp2(blocks.planes["scale"].cpu().double() - 127), scales)
        assert torch.equal(
            oracle.dequantize_fp8(as_bytes(blocks.planes["q"]).cpu(), scales, block), out
        )
    else:
        torch.testing.assert_close(blocks.planes["scale"].double().cpu(), scales, rtol=1e-6, atol=0)
        # A quotient on the other side of a tie moves a value by one step of E4M3.
        assert ((out - expected).abs() > 1e-6 * expected.abs()).double().mean() < 1e-3
        torch.testing.assert_close(out, expected, rtol=0.13, atol=1e-3 * scales.max().item())


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_fp4_matches_oracle(rows, cols, device):
    weight = make_weight(rows, cols, device)
    poison(device)
    out = dequantize(block_quantize(strided(weight), QuantType.MXFP4), torch.float32).double().cpu()
    expected, _ = oracle.round_groups(weight.cpu(), 32, "fp4")
    assert torch.equal(out, expected)
    blocks = block_quantize(strided(weight), QuantType.MXFP4)
    decoded = oracle.dequantize_fp4(
        blocks.planes["q"].cpu(), torch.exp2(blocks.planes["scale"].cpu().double() - 127)
    )
    assert torch.equal(out, decoded)
    blocks = block_quantize(weight, QuantType.NVFP4)
    expected, scales, total = oracle.nvfp4_blocks(weight.cpu())
    assert torch.equal(blocks.planes["scale"].float().double().cpu(), scales)
    assert blocks.planes["global_scale"].item() == pytest.approx(total, rel=1e-6)
    out = dequantize(blocks, torch.float32).double().cpu()
    close = torch.isclose(out, expected, rtol=1e-6, atol=1e-12)
    assert (~close).double().mean() < 1e-3  # ties that float32 rounds to the other side


@pytest.mark.parametrize("qtype", FORMATS, ids=lambda q: q.name)
def test_stacks_are_their_matrices(qtype, device):
    weight = torch.stack([make_weight(70, 96, device) * scale for scale in (1.0, 0.01, 30.0)])
    blocks = block_quantize(weight, qtype)
    assert blocks.shape == (3, 70, 96)
    index = torch.tensor([2, 0, 2], device=device)
    taken = dequantize(blocks.take(index), torch.bfloat16)
    for place, expert in enumerate((2, 0, 2)):
        alone = dequantize(block_quantize(weight[expert], qtype), torch.float32)
        assert torch.equal(dequantize(blocks, torch.float32)[expert], alone)
        assert torch.equal(taken[place], alone.bfloat16())


def test_zero_and_nan_weights(device):
    for qtype in FORMATS:
        zeros = torch.zeros(5, 64, device=device)
        assert torch.equal(dequantize(block_quantize(zeros, qtype), torch.float32), zeros)
    zeros[3, 2] = float("nan")
    out = dequantize(block_quantize(zeros, QuantType.MXFP4), torch.float32)
    assert out[3, :32].isnan().all()
    assert out.isnan().sum() == 32


def test_e8m0_bytes(device):
    scale = torch.tensor([[0, 1, 127, 254, 255]], dtype=torch.uint8, device=device)
    q = torch.full((1, 80), 0x22, dtype=torch.uint8, device=device)  # ones
    out = dequantize(blocks_of(QuantType.MXFP4, q, scale), torch.float32)[0, ::32].double().cpu()
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
        block_quantize(weight[0], QuantType.FP8_BLOCK)
    with pytest.raises(ArgumentError, match="40 columns are not whole groups of MXFP4"):
        block_quantize(weight[:, :40], QuantType.MXFP4)
    with pytest.raises(ArgumentError, match=r"weight is empty, \(0, 64\)"):
        block_quantize(weight[:0], QuantType.NVFP4)
    with pytest.raises(ArgumentError, match=r"block is \(0, 128\)"):
        block_quantize(weight, QuantType.FP8_BLOCK, block=(0, 128))
    blocks = block_quantize(weight, QuantType.MXFP4)
    with pytest.raises(ArgumentError, match=r"dtype=torch.int8"):
        dequantize(blocks, torch.int8)
    with pytest.raises(ArgumentError, match="Q4_K is no block format"):
        block_quantize(weight, QuantType.Q4_K)
    q, scale = blocks.planes["q"], blocks.planes["scale"]
    total = torch.ones((), device=device)
    fp8 = block_quantize(weight, QuantType.FP8_BLOCK, block=(2, 48)).planes
    for planes, text, hint in (
        ((QuantType.MXFP4, q, scale[:, :1]), r"scales of MXFP4 \(4, 64\) are \(4, 1\)", "(4, 2)"),
        ((QuantType.MXFP4, q, scale.int()), r"are \(4, 2\) torch.int32", "torch.uint8"),
        ((QuantType.MXFP4, q.view(torch.int8), scale), r"values of MXFP4 .* torch.int8", "uint8"),
        ((QuantType.MXFP4, q[:, :20], scale[:, :1]), "has 40 columns", "multiple of 32"),
        ((QuantType.NVFP4, q, scale), r"NVFP4 with the planes \['q', 'scale'\]", "divisor"),
        ((QuantType.FP8_BLOCK, fp8["q"].view(torch.uint8), fp8["scale"]), "torch.uint8", "view"),
        ((QuantType.FP8_BLOCK, fp8["q"], fp8["scale"]), r"are \(2, 2\)", "(1, 1)"),
    ):
        with pytest.raises(ArgumentError, match=text) as error:
            dequantize(blocks_of(*planes), torch.float32)
        assert hint in error.value.hint
    with pytest.raises(ArgumentError, match="MXFP4 with the planes"):
        dequantize(blocks_of(QuantType.MXFP4, q, scale, divisor=total), torch.float32)
    nv = block_quantize(weight, QuantType.NVFP4).planes
    nv["global_scale"] = total[None]
    with pytest.raises(ArgumentError, match=r"global_scale of \(4, 64\) is \(1,\)"):
        dequantize(blocks_of(QuantType.NVFP4, **nv), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stack", [(), (3,)])
@pytest.mark.parametrize("qtype", FORMATS, ids=lambda q: q.name)
def test_rows_at_a_time_give_the_same(qtype, stack, dtype, device, monkeypatch):
    """Decoded in slices of whole blocks, from planes with gaps, and by number."""
    weight = make_weight(133, 160, device).expand(*stack, 133, 160).contiguous()
    blocks = block_quantize(weight, qtype, block=(32, 48))
    whole = dequantize(blocks, dtype)
    planes = {name: strided(p) if p.dim() > 1 else p for name, p in blocks.planes.items()}
    gaps = blocks_of(qtype, **planes, block=(32, 48))
    index = torch.tensor([2, 0, 2], device=device)
    for limit in (1, 160 * 40, 3 * 160 * 64):
        monkeypatch.setattr(dequantize_op, "CHUNK_WEIGHTS", limit)
        poison(device)
        out = dequantize(gaps, dtype)
        assert out.is_contiguous()
        assert torch.equal(out, whole)
        assert torch.equal(dequantize(gaps, dtype, index), whole[index])


@pytest.mark.parametrize("has_divisor", [False, True])
def test_a_stack_of_nvfp4_matches_oracle(has_divisor, device):
    """Random bytes of both planes; each matrix has a scale of its own."""
    q = torch.randint(0, 256, (3, 37, 48), dtype=torch.uint8)
    scale = torch.randint(0, 126, (3, 37, 6), dtype=torch.uint8).view(torch.float8_e4m3fn)
    total = torch.tensor([0.3, 17.0, 1e-4])
    others = {"divisor" if has_divisor else "global_scale": total.to(device)}
    blocks = blocks_of(QuantType.NVFP4, q.to(device), scale.to(device), **others)
    poison(device)
    out = dequantize(blocks, torch.float32).double().cpu()
    factors = (1 / total.double() if has_divisor else total.double()).tolist()
    for i, factor in enumerate(factors):
        expected = oracle.dequantize_fp4(q[i], scale[i].float(), factor)
        torch.testing.assert_close(out[i], expected, rtol=2e-7, atol=0)


def test_layout_file_has_no_block_formats(device):
    planes = {"data": torch.zeros(2, 32, dtype=torch.uint8, device=device)}
    for qtype in (QuantType.FP8_BLOCK, QuantType.F8_E4M3, QuantType.U8):
        with pytest.raises(ArgumentError, match=f"{qtype.name} is no type of weights"):
            dequantize(QuantTensor(qtype, Layout.FILE, (2, 32), planes), torch.float32)


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
    blocks = block_quantize(torch.randn(3, 70, 96, device=device), QuantType.NVFP4)
    for run in (
        lambda: op.decode_kv_entries(op.encode_kv_entries(x, 64), 64),
        lambda: op.decode_index_keys(op.encode_index_keys(op.hadamard(x))),
        lambda: dequantize(blocks, torch.float32),
    ):
        assert torch.equal(captured(run), run())
