"""Decoding of block formats by the kernel: bit-equal to PyTorch operators, any strides."""

from dataclasses import replace

import pytest
import torch

from tests.dsv4_cases import FORMATS, blocks_of, captured, strided
from tiercel.ops import dequantize as op
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.dequantize import dequantize
from tiercel.quant_types import QuantType

FP8, MXFP4, NVFP4 = FORMATS
# Shape, block, whether scales are E8M0: partial blocks, rows and columns past a program's.
FP8_CASES = [
    ((70, 200), (128, 128), True),
    ((3, 70, 130), (32, 48), False),
    ((66, 257), (1, 128), True),
    ((5, 300), (128, 256), False),
    ((1, 1), (1, 1), True),
]
# bfloat16 is cut off by the interpreter where a GPU rounds.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] * torch.cuda.is_available())]


def run_kernel(weight, dtype):
    """The kernel's result, written between rows that must stay untouched."""
    *stack, rows, cols = weight.shape
    numel = weight.planes["q"].shape[:-1].numel() * cols
    guarded = torch.full((numel + 32,), float("nan"), dtype=dtype, device=weight.device)
    out = guarded[16:-16].view(*stack, rows, cols)
    op._launch_blocks(weight, out)
    assert guarded[:16].isnan().all()
    assert guarded[-16:].isnan().all()
    return out


def check(weight):
    for dtype in DTYPES:
        expected = op._decode_blocks(weight).to(dtype)
        torch.testing.assert_close(
            run_kernel(weight, dtype), expected, rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize(("shape", "block", "has_e8m0"), FP8_CASES)
def test_fp8(shape, block, has_e8m0, device):
    weight = torch.randn(shape, device=device)
    check(block_quantize(weight, FP8, block=block, has_e8m0=has_e8m0))


@pytest.mark.parametrize("shape", [(70, 160), (3, 66, 96), (1, 32)])
@pytest.mark.parametrize("qtype", [MXFP4, NVFP4], ids=lambda q: q.name)
def test_fp4(qtype, shape, device):
    check(block_quantize(torch.randn(shape, device=device), qtype))


@pytest.mark.parametrize("stack", [(), (3,)])
def test_a_divisor_divides(stack, device):
    weight = block_quantize(torch.randn(*stack, 5, 64, device=device), NVFP4)
    planes = dict(weight.planes)
    planes["divisor"] = 1 / planes.pop("global_scale") * 1.1
    check(replace(weight, planes=planes))


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_every_byte_and_scale(device):
    """Subnormal numbers, NaN and values beyond float32."""
    numbers = torch.arange(256, dtype=torch.uint8, device=device)
    q = numbers.view(torch.float8_e4m3fn).expand(256, 256).contiguous()
    check(blocks_of(FP8, q, numbers[:, None].contiguous(), block=(1, 256)))
    codes = numbers[:, None].expand(256, 16).contiguous()
    check(blocks_of(MXFP4, codes, numbers[:, None].contiguous()))
    scale = numbers.view(torch.float8_e4m3fn)[:, None].contiguous()
    codes = numbers[:8].expand(256, 8).contiguous()
    total = torch.tensor(0.37, device=device)
    check(blocks_of(NVFP4, codes, scale, global_scale=total))


@pytest.mark.parametrize("qtype", FORMATS, ids=lambda q: q.name)
def test_strided_planes(qtype, device):
    weight = block_quantize(torch.randn(3, 20, 96, device=device), qtype, block=(8, 32))
    planes = {name: strided(plane.view(torch.uint8)) for name, plane in weight.planes.items()
              if name in ("q", "scale")}  # fmt: skip
    planes = {name: plane.view(weight.planes[name].dtype) for name, plane in planes.items()}
    check(replace(weight, planes=weight.planes | planes))
    check(weight.rows(8, 16))
    check(weight.cols(32, 96))


def test_no_rows(device):
    weight = block_quantize(torch.randn(8, 32, device=device), FP8, block=(8, 32))
    assert run_kernel(weight.rows(0, 0), torch.float32).shape == (0, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", FORMATS, ids=lambda q: q.name)
def test_op_runs_the_kernel(qtype, device, monkeypatch):
    weight = block_quantize(torch.randn(2, 130, 4096, device=device), qtype)
    for dtype in DTYPES:
        monkeypatch.setenv("TIERCEL_BLOCK_KERNEL", "1")
        out = dequantize(weight, dtype)
        assert torch.equal(captured(lambda dtype=dtype: dequantize(weight, dtype)), out)
        monkeypatch.setenv("TIERCEL_BLOCK_KERNEL", "0")
        assert torch.equal(dequantize(weight, dtype), out)


def test_stacks_of_more_matrices_and_gaps_between_columns_are_left_to_pytorch(device):
    weight = block_quantize(torch.randn(2, 4, 64, device=device), QuantType.MXFP4)
    assert op._takes_blocks(weight)
    planes = weight.planes | {"q": weight.planes["q"].mT.contiguous().mT}
    assert not op._takes_blocks(replace(weight, planes=planes))
    assert not op._takes_blocks(replace(weight, shape=(op.MOST_MATRICES + 1, 4, 64)))
