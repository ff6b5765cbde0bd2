"""Products with weights in block formats, as stored: against the oracle, any tiles, both ops."""

from dataclasses import replace

import pytest
import torch

from tests.dsv4_cases import FORMATS, blocks_of, captured, strided
from tiercel.errors import ArgumentError
from tiercel.kernels.block import block_matvec as kernel
from tiercel.kernels.block.block_matvec import Planes, Tiles, select_tiles
from tiercel.ops import block_matvec as op
from tiercel.ops import linear as linear_op
from tiercel.ops.block_matvec import block_matvec
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.dequantize import dequantize
from tiercel.ops.grouped_linear import grouped_linear
from tiercel.ops.linear import join_rows, linear, pick_rows, prepare_linear
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import block_matvec as oracle

FP8, MXFP4, NVFP4 = FORMATS
# Of norms, float32 results: sums of up to 1,000 products, which tensor cores align and cut off.
EXACT = 1e-5 if torch.cuda.is_available() else 2e-6
# bfloat16 results; the interpreter cuts bits off where a GPU rounds.
ROUNDED = 3e-3 if torch.cuda.is_available() else 6e-3
# Shape, groups, block, E8M0: partial tiles and blocks; tiles within and across blocks and groups.
CASES = [
    (FP8, (133, 160), 1, (128, 128), True),
    (FP8, (160, 520), 1, (128, 128), False),
    (FP8, (40, 300), 1, (1, 256), True),
    (FP8, (96, 512), 2, (32, 128), True),
    (FP8, (64, 128), 2, (128, 128), True),
    (MXFP4, (40, 160), 1, None, True),
    (NVFP4, (66, 528), 2, None, True),
]


def make(qtype, shape, block=None, has_e8m0=True, device="cpu"):
    weight = torch.randn(shape, device=device) / shape[1] ** 0.5
    return block_quantize(weight, qtype, block=block or (1, 1), has_e8m0=has_e8m0)


def expected(x, weight, num_groups=1):
    return oracle.block_matvec(x, dequantize(weight, torch.float32), num_groups)


def relative_error(actual, wanted):
    return ((actual.double().cpu() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("num_tokens", [1, 19])
@pytest.mark.parametrize(("qtype", "shape", "num_groups", "block", "has_e8m0"), CASES)
def test_matches_oracle(qtype, shape, num_groups, block, has_e8m0, num_tokens, device):
    weight = make(qtype, shape, block, has_e8m0, device)
    x = torch.randn(num_tokens, num_groups * shape[1], device=device).bfloat16()
    out = torch.full((num_tokens + 2, shape[0] + 7), float("nan"), device=device)
    inner = out[1:-1, 3:-4]
    assert block_matvec(x, weight, num_groups, torch.float32, inner) is inner
    assert relative_error(inner, expected(x, weight, num_groups)) < EXACT
    inner.fill_(float("nan"))
    assert out.isnan().all()


@pytest.mark.parametrize("block", [(128, 128), (1, 128)])
def test_many_tokens(block, device):
    weight = make(FP8, (133, 260), block, device=device)
    x = torch.randn(130, 260, device=device).bfloat16()
    out = block_matvec(x, weight, out_dtype=torch.float32)
    assert relative_error(out, expected(x, weight)) < EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_in_the_dtype_of_x(dtype, device):
    weight = make(FP8, (133, 260), (128, 128), device=device)
    x = strided(torch.randn(3, 260, device=device).to(dtype))
    out = block_matvec(x, weight)
    assert out.dtype == dtype
    assert relative_error(out, expected(x, weight)) < ROUNDED


def run_tiles(x, weight, tiles):
    """The kernel's float32 result with tiles that may not be those of the shape."""
    num_tokens, rows = x.shape[0], weight.shape[0]
    planes = Planes(weight.planes["q"], weight.planes["scale"], weight.block, None, False)
    out = torch.full((num_tokens, rows), float("nan"), device=x.device)
    parts = None
    if tiles.splits > 1:
        parts = torch.full((tiles.splits, num_tokens, rows), float("nan"), device=x.device)
    kernel.launch_block_matvec(x, planes, 1, tiles, out, parts)
    return out


@pytest.mark.parametrize(
    "tiles", [Tiles(32, 16, 2), Tiles(64, 32, 1), Tiles(128, 16, 4), Tiles(128, 128, 2)], ids=str
)
def test_every_tile(tiles, device):
    """The last split of 4 has no columns left: 600 are 5 steps, 2 for each of the others."""
    weight = make(FP8, (150, 600), (128, 128), device=device)
    x = torch.randn(2, 600, device=device).bfloat16()
    assert relative_error(run_tiles(x, weight, tiles), expected(x, weight)) < EXACT


@pytest.mark.parametrize("qtype", FORMATS, ids=lambda q: q.name)
def test_bits_do_not_depend_on_the_number_of_tokens(qtype, device):
    weight = make(qtype, (40, 512), (128, 128), device=device)
    x = torch.randn(40, 512, device=device).bfloat16()
    whole = block_matvec(x, weight)
    for count in (1, 16):
        assert torch.equal(block_matvec(x[:count], weight), whole[:count])


@pytest.mark.filterwarnings("ignore:invalid value")
def test_scales_of_every_size(device):
    """Rows with the scales 2^-127 to 2^120, and a NaN scale, whose row alone is NaN."""
    powers = torch.arange(0, 248, 8, dtype=torch.uint8, device=device)
    powers[5] = 255
    q = torch.full((31, 128), 1.0, device=device).to(torch.float8_e4m3fn)
    weight = blocks_of(FP8, q, powers[:, None].contiguous(), block=(1, 128))
    x = torch.full((2, 128), 2.0**-7, device=device).bfloat16()
    out = block_matvec(x, weight, out_dtype=torch.float32)
    wanted = torch.exp2(powers.double() - 127).float()
    wanted[5] = float("nan")
    torch.testing.assert_close(out, wanted.expand(2, -1), rtol=0, atol=0, equal_nan=True)


def test_every_number(device):
    """Each finite E4M3 by itself, subnormal ones too; -0 counts as 0."""
    numbers = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    is_finite = ~numbers.float().isnan()
    q = torch.zeros(256, 128, device=device).to(torch.float8_e4m3fn)
    q[:, 77] = torch.where(is_finite, numbers.float(), 0.0).to(torch.float8_e4m3fn)
    scale = torch.full((2, 1), 127, dtype=torch.uint8, device=device)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.ones(1, 128, device=device, dtype=dtype)
        out = block_matvec(x, blocks_of(FP8, q, scale), out_dtype=torch.float32)
        assert torch.equal(out[0], q[:, 77].float())


def test_a_divisor_divides(device):
    weight = make(NVFP4, (40, 160), device=device)
    planes = dict(weight.planes)
    planes["divisor"] = 1 / planes.pop("global_scale")
    weight = replace(weight, planes=planes)
    x = torch.randn(2, 160, device=device).bfloat16()
    out = block_matvec(x, weight, out_dtype=torch.float32)
    assert relative_error(out, expected(x, weight)) < EXACT


def test_no_tokens_and_no_rows(device):
    weight = make(FP8, (128, 128), (128, 128), device=device)
    assert block_matvec(torch.empty(0, 128, device=device).bfloat16(), weight).shape == (0, 128)
    x = torch.ones(2, 128, device=device).bfloat16()
    assert block_matvec(x, weight.rows(0, 0)).shape == (2, 0)


# Groups, rows of a group, columns: wq_a, wkv, both, wq_b, wo_b, w1 and w3, w2, indexer, wo_a.
FLASH = [
    (1, 1024, 4096), (1, 512, 4096), (1, 1536, 4096), (1, 32768, 1024), (1, 4096, 8192),
    (1, 4096, 4096), (1, 4096, 2048), (1, 8192, 1024), (8, 1024, 4096),
]  # fmt: skip


@pytest.mark.parametrize("shape", FLASH, ids=str)
def test_tiles_of_flash_fill_a_gpu(shape):
    """One to three programs for each of 132 processors, at least two steps each."""
    num_groups, rows, cols = shape
    tiles = select_tiles(*shape, 16)
    assert select_tiles(*shape, 1) == tiles
    assert select_tiles(*shape, 64) == tiles._replace(tokens=32)
    assert select_tiles(*shape, 65)._replace(splits=1) == Tiles(128, 128, 1)
    assert rows % tiles.rows == 0
    assert 256 <= num_groups * rows // tiles.rows * tiles.splits <= kernel.MOST_PROGRAMS
    assert cols // kernel.COLS // tiles.splits >= kernel.LEAST_STEPS


def test_refusals(device):
    weight, bfloat16 = make(FP8, (64, 256), (32, 128)), torch.bfloat16
    assert op.shape_refusal(weight, bfloat16, 2) == ""
    assert "64 rows are not 3 groups" in op.shape_refusal(weight, bfloat16, 3)
    assert "torch.float32" in op.shape_refusal(weight, torch.float32)
    assert "NVFP4 with activations in torch.float16" in op.shape_refusal(
        make(NVFP4, (64, 256)), torch.float16
    )
    assert "blocks of 48 columns" in op.shape_refusal(make(FP8, (64, 96), (32, 48)), bfloat16)
    assert "no matrix" in op.shape_refusal(block_quantize(torch.randn(2, 4, 32), MXFP4), bfloat16)
    gaps = weight.planes["q"].mT.contiguous().mT
    weight = replace(weight, planes=weight.planes | {"q": gaps})
    assert op.shape_refusal(weight, bfloat16) == "gaps between columns"
    assert op.device_refusal(torch.device("cpu")) == "there is no kernel on cpu"
    assert op.refusal(weight, bfloat16, torch.device("cpu"))


def test_the_toggle(monkeypatch):
    cuda = torch.device("cuda")
    assert op.device_refusal(cuda) == ""
    monkeypatch.setenv("TIERCEL_BLOCK_KERNEL", "0")
    assert op.device_refusal(cuda) == "TIERCEL_BLOCK_KERNEL=0"


def test_tokens_that_are_taken(device, monkeypatch):
    """For TIERCEL_EXACT all, in the order of sums of a few."""
    weights = [make(qtype, (40, 256), (128, 128), device=device) for qtype in FORMATS]
    for weight in weights:
        most = op.MAX_TOKENS[weight.qtype]
        assert op.takes_tokens(weight, most)
        assert not op.takes_tokens(weight, most + 1)
    x = torch.randn(66, 256, device=device).bfloat16()
    monkeypatch.setenv("TIERCEL_EXACT", "1")
    for weight in weights:
        assert op.takes_tokens(weight, 10_000)
        assert torch.equal(block_matvec(x, weight)[:3], block_matvec(x[:3], weight))


def test_op_names_the_bad_argument(device):
    weight = make(FP8, (64, 256), (128, 128), device=device)
    x = torch.randn(2, 256, device=device).bfloat16()
    with pytest.raises(ArgumentError, match=r"x is \(2, 255\)"):
        block_matvec(x[:, :255], weight)
    with pytest.raises(ArgumentError, match="num_groups=2"):
        block_matvec(x, weight, 2)
    with pytest.raises(ArgumentError, match="no groups"):
        block_matvec(x, weight, 0)
    with pytest.raises(ArgumentError, match=r"torch\.float32"):
        block_matvec(x.float(), weight)
    with pytest.raises(ArgumentError, match="strides"):
        block_matvec(torch.randn(256, 2, device=device).bfloat16().t(), weight)


def test_neighbours_are_joined_where_borders_are_of_blocks(device):
    full, odd = (make(FP8, (rows, 256), (32, 128), device=device) for rows in (64, 70))
    wide = make(FP8, (64, 256), (32, 128), has_e8m0=False, device=device)
    for parts, rows in (
        ([full, full, odd], [198]),
        ([odd, full], [70, 64]),
        ([full, wide, wide], [64, 128]),
        ([full, make(FP8, (64, 256), (64, 128), device=device)], [64, 64]),
        ([make(MXFP4, (5, 256), device=device)] * 2, [10]),
        ([make(NVFP4, (5, 256), device=device)] * 2, [5, 5]),
    ):
        joined = join_rows(parts)
        assert [part.shape[0] for part in joined] == rows
        wanted = torch.cat([dequantize(part, torch.float32) for part in parts])
        found = [dequantize(part, torch.float32) for part in joined]
        assert torch.equal(torch.cat(found), wanted)
        for part in joined:
            part.check("join_rows")


@pytest.fixture
def on_kernel(monkeypatch):
    """Both ops take the kernel on any device."""
    monkeypatch.setattr(op, "device_refusal", lambda device: "")


@pytest.mark.usefixtures("on_kernel")
@pytest.mark.parametrize("num_tokens", [3, 70])
def test_linear_reads_weights_as_stored(num_tokens, device, monkeypatch):
    calls = []

    def count(*args, **named):
        calls.append(1)
        return block_matvec(*args, **named)

    monkeypatch.setattr(linear_op, "block_matvec", count)
    parts = [make(qtype, (64, 256), (64, 128), device=device) for qtype in (FP8, FP8, NVFP4)]
    weight = prepare_linear(parts, torch.bfloat16, device)
    assert [segment.shape[0] for segment in weight.segments] == [128, 64]
    x = torch.randn(num_tokens, 256, device=device).bfloat16()
    wanted = torch.cat([expected(x, part) for part in parts], dim=1)
    for out_dtype in (None, torch.float32):
        assert relative_error(linear(x, weight, out_dtype=out_dtype), wanted) < ROUNDED
    assert len(calls) == (4 if num_tokens == 3 else 2)  # of NVFP4 64 tokens are the most
    single = prepare_linear(parts[:2], torch.bfloat16, device)
    room = torch.full((num_tokens, 128), float("nan"), dtype=torch.bfloat16, device=device)
    assert linear(x, single, out=room) is room
    assert relative_error(room, wanted[:, :128]) < ROUNDED
    rows = torch.tensor([100, 3, 3], device=device)
    assert pick_rows(single, rows).reads_blocks
    assert relative_error(linear(x, pick_rows(single, rows)), wanted[:, rows.cpu()]) < ROUNDED


@pytest.mark.usefixtures("on_kernel")
@pytest.mark.parametrize("num_tokens", [3, 70])
@pytest.mark.parametrize("qtype", FORMATS, ids=lambda q: q.name)
def test_grouped_linear_reads_weights_as_stored(qtype, num_tokens, device):
    weight = make(qtype, (64, 256), (64, 128), device=device)
    x = torch.randn(num_tokens, 4, 128, device=device).bfloat16()
    out = grouped_linear(x, weight, 2)
    assert relative_error(out, expected(x.flatten(1), weight, 2)) < ROUNDED


@pytest.mark.gpu
@pytest.mark.parametrize("shape", FLASH, ids=str)
def test_shapes_of_flash(shape, device):
    num_groups, rows, cols = shape
    weight = make(FP8, (num_groups * rows, cols), (128, 128), device=device)
    x = torch.randn(200, num_groups * cols, device=device).bfloat16()
    many = block_matvec(x, weight, num_groups, torch.float32)
    assert relative_error(many, expected(x, weight, num_groups)) < 1e-5
    x = x[:40]
    out = block_matvec(x, weight, num_groups, torch.float32)
    assert relative_error(out, expected(x, weight, num_groups)) < 1e-5
    for count in (1, 7, 16, 17):
        few = block_matvec(x[:count], weight, num_groups, torch.float32)
        assert torch.equal(few, out[:count])
    found = captured(lambda: block_matvec(x, weight, num_groups, torch.float32))
    assert torch.equal(found, out)


def test_layout_file_is_not_taken():
    assert op.shape_refusal(
        replace(make(MXFP4, (4, 32)), layout=Layout.FILE), torch.bfloat16
    ).startswith(QuantType.MXFP4.name)
