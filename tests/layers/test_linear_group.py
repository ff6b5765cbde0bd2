"""Layers that read one x: in one launch where a kernel takes them, else one after the other."""

from dataclasses import replace

import pytest
import torch

from tests.ops.test_linear_group import make_bf16, make_fp8, make_q8, relative_error
from tiercel.layers import linear_group as layer
from tiercel.layers.linear import Linear
from tiercel.layers.linear_group import (
    GateUp,
    GroupedLinear,
    group_refusal,
    multiply_group,
)
from tiercel.layers.norm import RMSNorm
from tiercel.ops import linear as linear_op
from tiercel.ops import linear_group as op
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.dequantize import dequantize
from tiercel.ops.linear import LinearWeight, linear, prepare_linear
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType

IN, OUT = 256, 40


@pytest.fixture
def calls(monkeypatch):
    """The op takes tensors of any device; the matrices of each launch."""
    found = []

    def count(x, matrices, **options):
        found.append(len(matrices))
        return op.linear_group(x, matrices, **options)

    monkeypatch.setattr(op, "device_refusal", lambda device: "")
    monkeypatch.setattr(layer, "linear_group", count)
    return found


def test_q8_rests_in_planes_that_few_rows_read(calls, monkeypatch, device):
    """Beside a dense copy, or alone; between other formats."""
    monkeypatch.setattr(linear_op, "keeps_q8_planes", lambda qtype, *_: qtype is QuantType.Q8_0)
    data = torch.randint(0, 256, (OUT, IN // 32, 34), dtype=torch.uint8, device=device)
    data[..., 1] = 0x20  # the scale
    q8 = QuantTensor(QuantType.Q8_0, Layout.FILE, (OUT, IN), {"data": data.flatten(1)})
    other = torch.randn(24, IN, device=device).bfloat16().view(torch.uint8)
    bf16 = QuantTensor(QuantType.BF16, Layout.FILE, (24, IN), {"data": other})
    wanted = torch.cat([dequantize(part, torch.float32) for part in (q8, q8, bf16)]).double().cpu()
    for has_copy in (False, True):
        options = {"dense_copies": has_copy, "reads_q8": True}
        weight = prepare_linear([q8, q8, bf16], torch.bfloat16, torch.device(device), **options)
        assert [segment.shape[0] for segment in weight.segments] == [2 * OUT, 24]
        assert (weight.dense is not None) == has_copy
        for rows in (3, 40, 70):
            x = torch.randn(rows, IN, device=device).bfloat16()
            found = linear(x, weight)
            assert relative_error(found, x.double().cpu() @ wanted.t()) < 1e-2
    (together,) = multiply_group(x[:3], [Linear(weight)])
    assert calls == [2]
    assert relative_error(together, x[:3].double().cpu() @ wanted.t()) < 1e-2
    stored = prepare_linear([q8, make_fp8((OUT, IN), device=device)], torch.bfloat16,
                            torch.device(device), reads_q8=True)  # fmt: skip
    assert stored.dense is None
    assert len(stored.segments) == 2


def make_linear(*segments, **options):
    rows = sum(segment.shape[0] for segment in segments)
    return Linear(LinearWeight(segments, (rows, IN)), **options)


def make_parts(device):
    """Formats side by side, float32 results, two segments in one layer."""
    return [
        make_linear(make_fp8((OUT, IN), device=device)),
        make_linear(
            make_fp8((OUT, IN), device=device),
            make_bf16((24, IN), device),
            out_dtype=torch.float32,
        ),
        GateUp(make_linear(make_fp8((OUT, IN), device=device)), 0.5),
    ]


@pytest.mark.parametrize("has_norm", [False, True])
def test_one_launch_gives_what_single_layers_give(has_norm, calls, device):
    x = torch.randn(3, IN, device=device).bfloat16()
    norm = RMSNorm(torch.rand(IN, device=device), 1e-6, torch.bfloat16) if has_norm else None
    parts = make_parts(device)
    found = multiply_group(x, parts, norm)
    assert calls == [4]
    alone = [part(x if norm is None else norm(x)) for part in parts]
    assert [(one.dtype, one.shape) for one in found] == [(one.dtype, one.shape) for one in alone]
    for one, other in zip(found, alone, strict=True):
        assert relative_error(one, other.double().cpu()) < 1e-2


def test_a_launch_gives_float32_where_it_may(calls, device):
    """Also to a layer of two segments."""
    x = torch.randn(3, IN, device=device).bfloat16()
    split = make_linear(make_fp8((OUT, IN), device=device), make_bf16((24, IN), device))
    (found,) = multiply_group(x, [split], is_wide=True)
    assert calls == [2]
    assert found.dtype == torch.float32
    assert relative_error(found, split(x).double().cpu()) < 1e-2


@pytest.mark.parametrize("make", [make_fp8, make_q8])
def test_heads_are_rotated_back_before_the_product(make, calls, device):
    weight, table = make((384, IN), device=device), torch.randn(9, 2, 8, device=device)
    x = torch.randn(2, 12, 64, device=device).bfloat16()
    rotation = (torch.tensor([8, 3], device=device), table)
    grouped = GroupedLinear(weight, 3)
    found = grouped(x, rotation)
    assert calls == [1]
    odd = (rotation[0], table[:, :, :7])
    assert grouped(x, odd).shape == (2, 384)
    many = (torch.tensor([8, 3] * 10, device=device), table)
    wanted = grouped(x.repeat(10, 1, 1), many)
    dense = GroupedLinear(weight, 3, wanted.new_zeros(384, IN))
    assert not dense(x.repeat(10, 1, 1), many).any()
    assert calls == [1]
    assert relative_error(found, wanted[:2].double().cpu()) < 1e-2


def test_refusals(calls, device):
    x = torch.randn(2, IN, device=device).bfloat16()
    parts = make_parts(device)
    assert group_refusal(x, parts, None) == ""
    assert "9 tokens" in group_refusal(x[:1].expand(9, -1), parts, None)
    wide = RMSNorm(torch.ones(IN, device=device), 1e-6, torch.float32)
    assert group_refusal(x, parts, wide) == "the norm gives torch.float32"
    rounded = make_linear(make_fp8((OUT, IN), device=device), rounds_input=True)
    assert "rounds its input" in group_refusal(x, [rounded], None)
    biased = make_linear(make_bf16((OUT, IN), device), bias=torch.ones(OUT, device=device))
    assert "bias" in group_refusal(x, [biased], None)
    mixed = GateUp(make_linear(make_fp8((OUT, IN)), make_bf16((OUT, IN))), None)
    assert group_refusal(x, [mixed], None) == "gate and up have different formats"
    fp4 = make_linear(block_quantize(torch.randn(OUT, IN), QuantType.MXFP4))
    assert "MXFP4" in group_refusal(x, [fp4], None)
    own = Linear(LinearWeight((replace(parts[0].weight, segments=()),), (OUT, IN)))
    assert group_refusal(x, [own], None) == "a matrix rests in a form of its own"
    assert "9 matrices" in group_refusal(x, [parts[0]] * 9, None)
    assert not calls


def test_a_cpu_multiplies_one_after_the_other():
    x = torch.randn(2, IN).bfloat16()
    parts = make_parts("cpu")
    assert group_refusal(x, parts, None) == "there is no kernel on cpu"
    for one, part in zip(multiply_group(x, parts), parts, strict=True):
        assert torch.equal(one, part(x))
