"""packed_mlp against its oracle, and the launches that it chooses."""

import pytest
import torch

from tests.packed_weights import make_massive, make_tokens, make_weight, relative_error
from tiercel.errors import ArgumentError
from tiercel.kernels.packed import packed_mlp as kernel
from tiercel.ops.packed_gemm import (
    TYPES,
    NextNorm,
    has_packed_gemm,
    norm_room,
    packed_gemm,
    packed_gemm_norm,
)
from tiercel.ops.packed_matvec import prepare_packed
from tiercel.ops.packed_mlp import mlp_refusal, packed_mlp, packed_mlp_norm
from tiercel.ops.packed_norm import packed_norm
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import packed_mlp as oracle
from tiercel.reference.packed_gemm import packed_gemm as gemm_oracle
from tiercel.reference.packed_norm import packed_norm as norm_oracle

# Three roundings in a row: of the weights of both products, and of what is between them.
TOLERANCE = 2e-3
PAIRS = [TYPES[:2], TYPES[1::-1], TYPES[2:4]]
# (hidden, inner): less than a CTA's rows, rows that its tiles do not divide, several units.
SIZES = [(256, 256), (512, 1280), (768, 512)]


@pytest.fixture
def hopper(device):
    """The device, if the kernel runs there; a CPU has the op's other path."""
    if device.type == "cuda" and not has_packed_gemm(device):
        pytest.skip("the kernel is built for Hopper")
    return device


def make_parts(types, sizes, device):
    """The parts of gate with up and of down."""
    hidden, inner = sizes
    return [
        make_weight(types[0], 2 * inner, hidden, device, seed=1),
        make_weight(types[1], hidden, inner, device, seed=2),
    ]


def make_inputs(tokens, hidden, device):
    """Tokens whose act(gate) * up is neither too small nor too large for float16."""
    x = make_tokens(tokens, hidden, device).float()
    sizes = torch.linspace(2, 50, tokens, device=device)[:, None]
    return (x / x.abs().amax(dim=1, keepdim=True) * sizes).half()


def expect(x, parts, activation):
    data = [(part.planes["data"], part.qtype.name) for part in parts]
    return oracle.packed_mlp(x, *data, activation)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("types", PAIRS, ids=lambda types: types[0].name)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_oracle(sizes, types, activation, hopper):
    parts = make_parts(types, sizes, hopper)
    weights = [prepare_packed(part, Layout.SOA) for part in parts]
    x = make_inputs(140, sizes[0], hopper)
    expected = expect(x, parts, activation)
    for tokens in (17, 33, 96, 140):
        out = packed_mlp(x[:tokens], *weights, activation)
        assert relative_error(out, expected[:tokens]) < TOLERANCE, tokens


def test_configs_agree():
    """Both products read the same tiles of tokens."""
    for tokens in (17, 32, 33, 64, 96, 97, 1000):
        configs = kernel.select_packed_mlp(("Q4_K", "Q6_K"), (4096, 12288), tokens)
        assert configs[0].tokens == configs[1].tokens


def test_no_tokens(hopper):
    weights = [prepare_packed(p, Layout.SOA) for p in make_parts(PAIRS[0], (256, 512), hopper)]
    x = torch.empty(0, 256, dtype=torch.float16, device=hopper)
    assert packed_mlp(x, *weights, "silu").shape == (0, 256)


def test_wrong_arguments(device):
    parts = make_parts(PAIRS[0], (256, 512), device)
    weights = [prepare_packed(part, Layout.SOA) for part in parts]
    x = torch.zeros(20, 256, dtype=torch.float16, device=device)
    for bad in (x.float(), x[:, :128], x[0]):
        with pytest.raises(ArgumentError, match="packed_mlp: x is"):
            packed_mlp(bad, *weights, "silu")
    with pytest.raises(ArgumentError, match="activation 'relu' is unknown"):
        packed_mlp(x, *weights, "relu")
    with pytest.raises(ArgumentError, match="are no MLP"):
        packed_mlp(x, weights[0], weights[0], "silu")
    other = prepare_packed(make_weight(QuantType.Q2_K, 256, 512, device), Layout.SOA)
    assert mlp_refusal(weights[0], other) == "packed_gemm does not read a matrix"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [17, 64, 96, 140])
def test_products_norm_the_residual(tokens, hopper):
    """Two products that add to the residual, and their readers, against the oracle."""
    hidden, inner, eps = 1280, 768, 1e-6
    qkv_part = make_weight(TYPES[1], 200, hidden, hopper, seed=4)
    output_part = make_weight(TYPES[0], hidden, 512, hopper, seed=3)
    parts = make_parts(PAIRS[0], (hidden, inner), hopper)
    qkv, output, gate_up, down = (
        prepare_packed(part, Layout.SOA) for part in (qkv_part, output_part, *parts)
    )
    earlier, start = make_massive(tokens, hidden, hopper)
    heads, weight = make_tokens(tokens, 512, hopper), torch.rand(hidden, device=hopper) + 0.5
    room, x = norm_room(weight), earlier.clone()
    image = packed_norm(x, weight, eps, (4,))
    x.copy_(start)
    image = packed_gemm_norm(heads, output, NextNorm(x, weight, eps, (4,), image.roots, room))
    norm = NextNorm(x, weight, eps, (4, 6), image.roots, room)
    image = packed_mlp_norm(image, gate_up, down, "silu", norm)
    out = packed_gemm(image, qkv, torch.float32)

    total = start.double().cpu() + gemm_oracle(heads, output_part.planes["data"], "Q4_K")
    total += expect(norm_oracle(total, weight.cpu(), eps), parts, "silu")
    normed = norm_oracle(total, weight.cpu(), eps)
    expected = gemm_oracle(normed, qkv_part.planes["data"], "Q6_K")
    assert total.isfinite().all()
    assert relative_error(x, total) < TOLERANCE
    assert relative_error(out, expected) < TOLERANCE
    roots = (total.square().mean(dim=1) + eps).rsqrt()
    assert torch.allclose(image.roots[:tokens].double().cpu(), roots, 1e-3)
