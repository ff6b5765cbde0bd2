"""No operator of DeepSeek-V4 reads a tensor's values on the host: they run on fake tensors.

A fake tensor has a shape and no values, so `.item()`, a Boolean mask as index, or a size taken from
data raises an error here, on any machine.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.dsv4_cases import FORMATS
from tiercel.ops import block_quantize as codecs
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.dequantize import dequantize
from tiercel.ops.grouped_linear import grouped_linear
from tiercel.ops.indexer_topk import PagedKeys, indexer_topk
from tiercel.ops.kv_compress import completing_tokens, compress_terms, kv_compress
from tiercel.ops.latent_rope import latent_cache_write, latent_rope
from tiercel.ops.mhc_mix import mhc_mix_collapse, mhc_mix_post, mhc_mix_pre
from tiercel.ops.moe_experts import Experts, moe_experts
from tiercel.ops.moe_route import moe_route, moe_route_hash
from tiercel.ops.sparse_attention import SlottedKV, sparse_attention
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType


def floats(*shape):
    return torch.empty(*shape)


def integers(*shape):
    return torch.empty(*shape, dtype=torch.int64)


def octets(*shape):
    return torch.empty(*shape, dtype=torch.uint8)


def run_block_quantize():
    for qtype in FORMATS:
        dequantize(block_quantize(floats(3, 70, 96), qtype).take(integers(2)), torch.float32)
    codecs.round_fp8_g128(floats(7, 200))
    codecs.decode_kv_entries(codecs.encode_kv_entries(floats(7, 512), 64), 64)
    codecs.decode_index_keys(codecs.encode_index_keys(codecs.hadamard(floats(7, 128))))


def run_mhc_mix():
    streams, fn, eps = floats(5, 4, 96), floats(24, 384), {"rms_eps": 1e-6, "hc_eps": 1e-6}
    mixed = mhc_mix_pre(streams, fn, floats(3), floats(24), sinkhorn_iters=20, **eps)
    mhc_mix_post(streams, *mixed)
    mhc_mix_collapse(streams, fn[:4], floats(1), floats(4), **eps)


def run_latent_rope():
    out = latent_rope(floats(7, 3, 40), integers(7), floats(99, 2, 8), eps=1e-6)
    latent_cache_write(out[:, 0], floats(3, 4, 40), integers(7))


def run_kv_compress():
    positions = integers(300)
    step = (positions, integers(300), integers(3), integers(2, 3))
    sizes = {"block_size": 128, "rows_per_block": 32}
    tokens = completing_tokens(positions, ratio=4, capacity=80)
    terms = compress_terms(tokens, *step, ratio=4, has_overlap=True, **sizes)
    inputs = (floats(300, 48), floats(300, 48), floats(4, 32, 48), floats(4, 32, 48))
    kv_compress(*inputs, terms, floats(24), floats(99, 2, 8), ratio=4, eps=1e-6)


def run_indexer_topk():
    paged = PagedKeys(floats(11, 32, 64), None, integers(2, 9), integers(5))
    indexer_topk(floats(5, 12, 64), floats(5, 12), paged, integers(5), topk=7, max_entries=288)


def run_sparse_attention():
    part = SlottedKV(floats(6, 5, 40), integers(5, 9))
    sparse_attention(floats(5, 4, 40), (part, part), floats(4), 1.0)


def run_moe_route():
    moe_route(floats(5, 256), floats(256), topk=6, scale=1.5)
    moe_route_hash(floats(5, 256), integers(99, 6), integers(5), scale=1.5)


def run_moe_experts():
    shapes = ((6, 64, 96), (6, 64, 96), (6, 96, 64))
    for num_tokens, qtype in zip((1, 50, 1200), FORMATS, strict=True):
        experts = Experts(*(block_quantize(floats(*shape), qtype) for shape in shapes))
        x, ids, weights = floats(num_tokens, 96), integers(num_tokens, 2), floats(num_tokens, 2)
        moe_experts(x, ids, weights, experts, limit=1.0)
    shapes = ((6, 64, 256), (6, 64, 256), (6, 256, 64))
    stored = [
        QuantTensor(
            qtype, Layout.FILE, shape, {"data": octets(*shape[:2], qtype.row_bytes(shape[2]))}
        )
        for qtype, shape in zip(
            (QuantType.Q4_K, QuantType.Q4_K, QuantType.MXFP4), shapes, strict=True
        )
    ]
    moe_experts(floats(3, 256), integers(3, 2), floats(3, 2), Experts(*stored), limit=1.0)


def run_grouped_linear():
    grouped_linear(floats(5, 320), block_quantize(floats(96, 160), QuantType.FP8_BLOCK), 2)


RUNS = [
    run_block_quantize, run_mhc_mix, run_latent_rope, run_kv_compress, run_indexer_topk,
    run_sparse_attention, run_moe_route, run_moe_experts, run_grouped_linear,
]  # fmt: skip


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__.removeprefix("run_"))
def test_no_value_is_read_on_the_host(run):
    with FakeTensorMode():
        run()


def test_a_host_sync_is_noticed():
    """The conversion of MXFP4 reads a value; it is not an op of a step."""
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        codecs.mxfp4_to_nvfp4(block_quantize(floats(4, 64), QuantType.MXFP4))
