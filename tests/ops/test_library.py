"""Operators of DeepSeek-V4 as `torch.ops.tiercel.*`: schemas, shapes without data, results."""

import subprocess
import sys

import pytest
import torch

from tests.dsv4_cases import blocks_of
from tiercel.errors import ArgumentError
from tiercel.ops import grouped_linear as grouped
from tiercel.ops import latent_rope as rope
from tiercel.ops import library, mhc_mix, moe_route
from tiercel.ops.block_quantize import block_quantize, encode_index_keys, encode_kv_entries
from tiercel.ops.dequantize import dequantize
from tiercel.ops.indexer_topk import indexer_topk
from tiercel.ops.indexer_topk_torch import PagedKeys
from tiercel.ops.kv_compress import Terms, kv_compress_step
from tiercel.ops.moe_experts import moe_experts
from tiercel.ops.moe_experts_torch import Experts
from tiercel.ops.sparse_attention import sparse_attention
from tiercel.ops.sparse_attention_torch import SlottedKV
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType

ops = torch.ops.tiercel
T, N, HIDDEN, HEADS, D, ROTARY = 5, 4, 96, 3, 80, 16


def normal(*shape):
    return torch.randn(shape)


def mixing(rows, parts):
    return normal(rows, N * HIDDEN) / 20, normal(parts).abs(), normal(rows)


def table():
    return normal(40, 2, ROTARY // 2)


def positions():
    return torch.randint(0, 40, (T,), dtype=torch.int32)


def mhc_pre():
    arguments = (normal(T, N, HIDDEN), *mixing(24, 3), 1e-6, 1e-6, 5, normal(HIDDEN), 1e-5)
    names = ("rms_eps", "hc_eps", "sinkhorn_iters", "norm_weight", "norm_eps")
    named = dict(zip(names, arguments[4:], strict=True))
    return ops.mhc_mix_pre, arguments, mhc_mix.mhc_mix_pre(*arguments[:4], **named)


def mhc_post():
    arguments = normal(T, N, HIDDEN), normal(T, HIDDEN), normal(T, N), normal(T, N, N)
    return ops.mhc_mix_post, arguments, mhc_mix.mhc_mix_post(*arguments)


def mhc_collapse():
    arguments = (normal(T, N, HIDDEN), *mixing(N, 1), 1e-6, 1e-5)
    expected = mhc_mix.mhc_mix_collapse(*arguments[:4], rms_eps=1e-6, hc_eps=1e-5)
    return ops.mhc_mix_collapse, arguments, expected


def latent_rope():
    arguments = normal(T, HEADS, 64), positions(), table(), 1e-6, normal(64), True, True
    expected = rope.latent_rope(
        *arguments[:3], eps=1e-6, weight=arguments[4], inverse=True, has_hadamard=True
    )
    return ops.latent_rope, arguments, expected


def routes():
    arguments = normal(T, 9), normal(9), 3, 2.5
    return ops.moe_route, arguments, moe_route.moe_route(*arguments[:2], topk=3, scale=2.5)


def hash_routes():
    arguments = normal(T, 9), torch.randint(0, 9, (40, 2)), positions(), 1.5
    return ops.moe_route_hash, arguments, moe_route.moe_route_hash(*arguments[:3], scale=1.5)


def choice():
    keys = encode_index_keys(normal(4 * 8, 32)).view(4, 8, -1)
    tables = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
    rows = torch.tensor([0, 0, 1, 1, 1])
    paged = keys[..., :16], keys[..., 16:17], tables, rows
    arguments = normal(T, HEADS, 32), normal(T, HEADS), *paged, 2 + torch.arange(T), 3, 16
    expected = indexer_topk(*arguments[:2], PagedKeys(*paged), arguments[6], topk=3, max_entries=16)
    return ops.indexer_topk, arguments, expected


def attention():
    entries = encode_kv_entries(normal(6 * 4, D), ROTARY).view(6, 4, -1)
    width = D + ROTARY
    caches = [normal(3, 7, D), entries[..., :width]]
    scales = [torch.empty(0, dtype=torch.uint8), entries[..., width:]]
    slots = [torch.randint(-1, 21, (T, 4)), torch.randint(-1, 24, (T, 6))]
    arguments = normal(T, HEADS, D), caches, scales, slots, ROTARY, normal(HEADS), D**-0.5
    parts = (SlottedKV(caches[0], slots[0]), SlottedKV(caches[1], slots[1], scales[1], ROTARY))
    expected = sparse_attention(arguments[0], parts, arguments[5], arguments[6])
    return ops.sparse_attention, arguments, expected


def stack(kind, *shape):
    """Planes of random weights, and the weights."""
    dense = normal(*shape) / shape[-1] ** 0.5
    if kind == "BF16":
        return [dense.bfloat16()], dense.bfloat16()
    qtype = QuantType[kind]
    if qtype is QuantType.Q8_0:
        data = torch.randint(0, 9, (*shape[:-1], qtype.row_bytes(shape[-1])), dtype=torch.uint8)
        return [data], QuantTensor(qtype, Layout.FILE, shape, {"data": data})
    made = block_quantize(dense, qtype)
    return list(made.planes.values()), made


def experts(kind):
    gate, up, down = stack(kind, 4, 64, 96), stack(kind, 4, 64, 96), stack(kind, 4, 96, 64)
    tokens = normal(T, 96), torch.randint(0, 4, (T, 2)), normal(T, 2)
    block = [128, 128] if kind == "FP8_BLOCK" else [1, 1]
    arguments = *tokens, gate[0], up[0], down[0], kind, kind, block, 1.0
    expected = moe_experts(*tokens, Experts(gate[1], up[1], down[1]), limit=1.0)
    return ops.moe_experts, arguments, expected


def groups():
    planes, weight = stack("Q8_0", 6, 64)
    arguments = normal(T, 2, 64), planes, "Q8_0", [1, 1], 2
    return ops.grouped_linear, arguments, grouped.grouped_linear(arguments[0], weight, 2)


def products(kind, is_wide):
    planes, weight = stack(kind, 40, 64)
    x = normal(T, 64).bfloat16() if is_wide else normal(T, 64)
    dense = weight if isinstance(weight, torch.Tensor) else dequantize(weight, torch.float32)
    expected = x.float() @ dense.float().t()
    block = [128, 128] if kind == "FP8_BLOCK" else [1, 1]
    return ops.linear, (x, planes, kind, block, is_wide), expected


CASES = {
    made.__name__: made
    for made in (
        mhc_pre, mhc_post, mhc_collapse, latent_rope, routes, hash_routes, choice, attention, groups
    )
} | {
    f"experts in {kind}": lambda kind=kind: experts(kind)
    for kind in ("BF16", "FP8_BLOCK", "MXFP4", "NVFP4", "Q8_0")
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_functions(name):
    op, arguments, expected = CASES[name]()
    torch.testing.assert_close(op(*arguments), expected, rtol=0, atol=0)
    # Mutations and aliases, then shapes and strides of the fake implementation. The first compares
    # arguments by arithmetic that PyTorch lacks for floats of 8 bits.
    has_arithmetic = not any(kind in name for kind in ("FP8_BLOCK", "NVFP4"))
    checks = ("test_schema",) * has_arithmetic + ("test_faketensor", "test_autograd_registration")
    torch.library.opcheck(op.default, arguments, test_utils=checks)


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("kind", ["BF16", "FP8_BLOCK", "MXFP4", "Q8_0"])
def test_products_with_weights_of_each_kind(kind, is_wide):
    op, arguments, expected = products(kind, is_wide)
    found = op(*arguments)
    assert found.dtype == torch.float32
    assert (found - expected).norm() <= 5e-3 * expected.norm()
    torch.library.opcheck(op.default, arguments, test_utils=("test_faketensor",))


def test_entries_are_formed_and_inputs_kept():
    ratio, width = 4, 32
    kv, gate, bias = normal(ratio, width), normal(ratio, width), normal(ratio, width)
    phase, slots = torch.arange(ratio), torch.tensor([6, 2, -1, 4])
    terms = torch.tensor([3]), torch.tensor([[0, 1, 2, 3]]), torch.full((1, 4), -1)
    rest = normal(width), table(), 1e-6
    planes = [torch.zeros(2, 4, width) for _ in range(2)]
    expected = [plane.clone() for plane in planes]
    wanted = kv_compress_step(
        (kv, gate), bias, phase, tuple(expected), slots, Terms(*terms), *rest[:2], eps=rest[2]
    )
    arguments = kv, gate, bias, phase, *planes, slots, *terms, *rest
    assert torch.equal(ops.kv_compress_step(*arguments), wanted)
    assert all(map(torch.equal, planes, expected))
    assert planes[0].any()
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.kv_compress_step.default, arguments, test_utils=checks)


@pytest.mark.parametrize("is_encoded", [False, True])
def test_vectors_are_written_in_place(is_encoded):
    x, places, angles = normal(T, D), positions(), table()
    slots = torch.tensor([3, -1, 9, 17, 4])
    planes = (
        (torch.zeros(3, 8, D + ROTARY, dtype=torch.uint8), torch.zeros(3, 8, 8, dtype=torch.uint8))
        if is_encoded
        else (torch.zeros(3, 8, D), None)
    )
    expected = tuple(None if plane is None else plane.clone() for plane in planes)
    rope.latent_write(
        x, expected, slots, rotary_dim=ROTARY, rotation=(places, angles), norm=(1e-6, None)
    )
    arguments = x, *planes, slots, ROTARY, places, angles, 1e-6, None
    assert ops.latent_write(*arguments) is None
    torch.library.opcheck(ops.latent_write.default, arguments, test_utils=("test_schema",))
    for plane, one in zip(planes, expected, strict=True):
        assert plane is None or (torch.equal(plane, one) and plane.any())


def test_index_keys_are_written_in_place():
    planes = torch.zeros(2, 4, 16, dtype=torch.uint8), torch.zeros(2, 4, 8, dtype=torch.uint8)
    expected = tuple(plane.clone() for plane in planes)
    x, slots = normal(3, 32), torch.tensor([5, -1, 2])
    rope.index_key_write(x, expected, slots)
    ops.index_key_write(x, *planes, slots)
    torch.library.opcheck(
        ops.index_key_write.default, (x, *planes, slots), test_utils=("test_schema",)
    )
    for plane, one in zip(planes, expected, strict=True):
        assert torch.equal(plane, one)
        assert plane.any()


def test_stored_experts_of_folders_and_files_are_told_apart():
    """MXFP4 is one plane in GGUF files, and two in safetensors files."""
    folder = library.weight_of(stack("MXFP4", 2, 8, 64)[0], "MXFP4", [1, 1])
    file = library.weight_of([torch.zeros(2, 8, 34, dtype=torch.uint8)], "MXFP4", [1, 1])
    assert (folder.layout, file.layout) == (Layout.BLOCKS, Layout.FILE)
    assert folder.shape == file.shape == (2, 8, 64)
    made = block_quantize(normal(130, 200), QuantType.FP8_BLOCK)
    same = library.weight_of(list(made.planes.values()), "FP8_BLOCK", [128, 128])
    assert same == blocks_of(QuantType.FP8_BLOCK, **made.planes)


@pytest.mark.parametrize(
    ("kind", "count", "message"),
    [
        ("Q9_K", 1, "no weights of type 'Q9_K'"),
        ("I32", 1, "no weights of type 'I32'"),
        ("NVFP4", 2, "NVFP4 weights with 2 planes"),
        ("BF16", 2, "BF16 weights with 2 planes"),
    ],
)
def test_wrong_weights_are_refused(kind, count, message):
    with pytest.raises(ArgumentError, match=message):
        ops.grouped_linear(normal(2, 64), [normal(3, 64)] * count, kind, [1, 1], 1)


def test_errors_are_those_of_the_functions():
    with pytest.raises(ArgumentError, match="topk=0"):
        ops.moe_route(normal(2, 9), normal(9), 0, 1.0)
    _, arguments, _ = attention()
    with pytest.raises(ArgumentError, match="2 caches, 1 scales"):
        ops.sparse_attention(arguments[0], arguments[1], arguments[2][:1], *arguments[3:])
    slots = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="positions without a table"):
        ops.latent_write(normal(2, 8), normal(1, 1, 8), None, slots, 4, positions()[:2])


def test_a_compiler_sees_through_them():
    _, arguments, expected = routes()

    @torch.compile(fullgraph=True, backend="eager")
    def weighted(logits, bias):
        ids, weights = ops.moe_route(logits, bias, 3, 2.5)
        return ids + 1, 2 * weights

    ids, weights = weighted(*arguments[:2])
    assert torch.equal(ids, expected[0] + 1)
    assert torch.equal(weights, 2 * expected[1])


def test_nothing_imports_it():
    code = (
        "import sys, tiercel.models.deepseek_v4_model; print('tiercel.ops.library' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
