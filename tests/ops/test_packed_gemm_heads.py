"""Products that norm and rotate heads and write the cache, against the oracles of both parts."""

import pytest
import torch

from tests.packed_weights import make_tokens, make_weight
from tiercel.errors import ArgumentError
from tiercel.kernels.packed import packed_gemm as kernel
from tiercel.ops.packed_gemm import (
    has_packed_gemm,
    heads_refusal,
    keys_ahead,
    packed_gemm_heads,
)
from tiercel.ops.packed_matvec import prepare_packed, weight_exponent
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import packed_gemm as product_oracle
from tiercel.reference import rotary_kv_write as oracle

CPU = torch.device("cpu")
QUERIES, KEYS, COLUMNS, EPS = 4, 2, 768, 1e-6
TOLERANCE = 1.5e-3  # of a head: rounded weights, their factors and the result


@pytest.fixture
def hopper(device):
    """The device, if the kernel runs there."""
    if device.type == "cpu" or not has_packed_gemm(device):
        pytest.skip("the kernel is built for Hopper")
    return device


def make_heads(tokens, head_dim, device, *, has_norms, prefetches=False):
    """Where results go, poisoned, and the angles of each token; every seventh has no slot."""
    keys = None
    if prefetches:  # three requests: a table's end within a block, a block, a few tokens
        tables = torch.tensor([[9, 9], [2, 1], [0, 9], [1, 9], [9, 9]], dtype=torch.int32)
        rows, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([3, 1, 2], [3, 100, 64]))
        keys = kernel.KeyPrefetch(*(x.to(device) for x in (tables, rows, lengths)), 110_000)
    table_angles = torch.rand(500, head_dim // 2, dtype=torch.float64) * 6
    table = torch.stack((table_angles.cos(), table_angles.sin()), 1).float().contiguous()
    positions = torch.randint(0, 500, (tokens,), dtype=torch.int32)
    slots = torch.randperm(3 * 64)[:tokens]
    slots[::7] = -1
    caches = torch.full((2, 3, 64, KEYS, head_dim), float("nan"), dtype=torch.float16)
    norms = (torch.rand(2, head_dim) + 0.5).to(device).unbind() if has_norms else ()
    of_device = [x.to(device) for x in (positions, table, slots, *caches)]
    outputs = kernel.HeadOutputs(
        *of_device, norms, EPS if has_norms else 0.0, QUERIES, prefetch=keys
    )
    return outputs, table_angles[positions.long()]


def multiply(x, weights, outputs):
    """The op's queries."""
    to = outputs
    places = to.positions, to.table, to.k_cache, to.v_cache, to.slots
    options = {"num_heads": to.num_heads, "norms": to.norms, "eps": to.eps}
    if to.prefetch is not None:
        keys = to.prefetch
        options["prefetch"] = keys_ahead(keys.tables, keys.rows, keys.seq_lens, keys.num_bytes)
    return packed_gemm_heads(x, weights, *places, **options)


def expect(x, parts, outputs, angles):
    """Queries and both caches."""
    rows = [product_oracle.packed_gemm(x, p.planes["data"].cpu(), p.qtype.name) for p in parts]
    heads = torch.cat(rows, 1).unflatten(1, (QUERIES + 2 * KEYS, -1))
    caches = [torch.full(outputs.k_cache.shape, float("nan")).double() for _ in range(2)]
    weights = tuple(weight.cpu() for weight in outputs.norms) or None
    found = oracle.rotary_kv_write(
        heads, angles, *caches, outputs.slots.cpu(), weights, outputs.eps
    )
    return found[:, :QUERIES], *caches


def check(found, expected):
    """Heads alike, and what no slot has untouched."""
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.isnan().cpu(), other.isnan())
        one, other = one.double().cpu().nan_to_num(), other.nan_to_num()
        error = (one - other).norm(dim=-1) / other.norm(dim=-1).clamp(min=1e-30)
        assert error.max() < TOLERANCE


def product_of_heads(name, head_dim, config, device, *, has_norms, prefetches=False):
    """All heads by one launch, checked; returns `HeadOutputs`, queries and both caches."""
    torch.manual_seed(config.tokens)
    rows, tokens = (QUERIES + 2 * KEYS) * head_dim, config.tokens - 3
    part = make_weight(QuantType[name], rows, COLUMNS, device)
    tensor = packed_repack(part, Layout.SOA)
    x = make_tokens(tokens, COLUMNS, device)
    outputs, angles = make_heads(
        tokens, head_dim, device, has_norms=has_norms, prefetches=prefetches
    )
    image = x.new_full(kernel.image_shape(*x.shape), float("nan"))
    order = kernel.column_order(name)
    kernel.launch_packed_image(x, order, image, is_dependent=True)
    out = x.new_full((tokens, QUERIES * head_dim), float("nan"))
    kernel.launch_packed_product(
        tensor.ordered_planes(),
        name,
        image,
        out,
        (tokens, rows, COLUMNS),
        weight_exponent(part),
        config,
        heads=outputs,
        is_dependent=True,
    )
    found = out.unflatten(1, (QUERIES, head_dim)), outputs.k_cache, outputs.v_cache
    check(found, expect(x, [part], outputs, angles))
    return outputs, *found


def check_two_types(tokens, head_dim, device, *, has_norms):
    """The op with values of another type, as two launches; the first prefetches."""
    types = (QuantType.Q4_K, QUERIES + KEYS), (QuantType.Q6_K, KEYS)
    parts = [make_weight(t, n * head_dim, COLUMNS, device, n) for t, n in types]
    weights = [prepare_packed(part, Layout.SOA) for part in parts]
    outputs, angles = make_heads(
        tokens, head_dim, device, has_norms=has_norms, prefetches=has_norms
    )
    x = make_tokens(tokens, COLUMNS, device)
    q = multiply(x, weights, outputs)
    check((q, outputs.k_cache, outputs.v_cache), expect(x, parts, outputs, angles))


@pytest.mark.gpu
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", kernel.HEAD_DIMS)
@pytest.mark.parametrize("tokens", [1, 17, 32, 64, 96, 140])
def test_matches_oracle(tokens, head_dim, has_norms, hopper):
    check_two_types(tokens, head_dim, hopper, has_norms=has_norms)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", kernel.HEAD_DIMS)
@pytest.mark.parametrize("tile", kernel.TOKEN_CLASSES)
def test_every_launch_is_right(tile, head_dim, hopper):
    for name in ("Q4_K", "Q6_K", "Q8_0"):
        for groups, splits in [(1, 1), (2, 1), (2, 3), (3, 2), (1, 3)]:
            config = kernel.make_config(name, tile, groups, splits)
            if 64 * groups % head_dim or config.stages < 2:
                continue  # `select_packed_gemm` leaves it out
            runs = [
                product_of_heads(
                    name, head_dim, config, hopper, has_norms=True, prefetches=prefetches
                )[1:]
                for prefetches in (False, True)
            ]
            for one, other in zip(*runs, strict=True):
                assert torch.equal(one.nan_to_num(), other.nan_to_num()), config


@pytest.mark.parametrize("head_dim", kernel.HEAD_DIMS)
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q5_K", "Q8_0"])
def test_launches_have_whole_heads(name, head_dim):
    for heads in (1, 8, 40, 48, 1400):
        for tokens in (17, 64, 96, 128):
            shape = heads * head_dim, 4096
            config = kernel.select_packed_gemm(name, shape, tokens, head_dim)
            assert not 64 * config.groups % head_dim
            assert config.stages >= 2


def test_refusals():
    parts = [prepare_packed(make_weight(QuantType.Q4_K, 192, 256, CPU), Layout.SOA)]
    assert not heads_refusal(parts, 64, torch.float16)
    assert "256, none of" in heads_refusal(parts, 256, torch.float16)
    assert heads_refusal(parts, 128, torch.float16) == "a matrix ends within a head"
    assert heads_refusal(parts, 64, torch.bfloat16) == "the cache is bfloat16, not float16"
    other = [prepare_packed(make_weight(QuantType.Q2_K, 192, 256, CPU), Layout.SOA)]
    assert heads_refusal(other, 64, torch.float16) == "packed_gemm does not read a matrix"


def test_wrong_arguments():
    outputs, _ = make_heads(20, 64, CPU, has_norms=True)
    weights = [prepare_packed(make_weight(QuantType.Q4_K, 192, 256, CPU), Layout.SOA)]
    x = torch.zeros(20, 256, dtype=torch.float16)
    with pytest.raises(ArgumentError, match="packed_gemm_heads: 192 rows for 8 heads of 64"):
        multiply(x, weights, outputs)
    with pytest.raises(ArgumentError, match="packed_gemm_heads: x is"):
        multiply(x.float(), weights, outputs)
