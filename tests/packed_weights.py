"""Random packed weights and tokens, and error measures for tests of their products."""

import numpy as np
import torch

from tiercel.ops.packed_matvec import prepare_packed
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout

LAYOUTS = (Layout.FILE, Layout.SOA)  # of weights that kernels read packed
# First bytes of the fp16 fields of a block.
HALVES = {
    "F16": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "IQ4_NL": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_XS": (0,), "IQ2_XXS": (0,), "MXFP4": (),
}  # fmt: skip


def make_weight(qtype, rows, columns, device, seed=0):
    """Random bits with d (and dmin) of real files: 1e-5 to 1e-3, of both signs, some subnormal."""
    rng = np.random.default_rng(seed)
    blocks = columns // qtype.block_weights
    data = rng.integers(0, 256, (rows, blocks, qtype.block_bytes), dtype=np.uint8)
    for at in HALVES[qtype.name]:
        d = 10.0 ** rng.uniform(-5, -3, (rows, blocks, 1)) * rng.choice([-1, 1], (rows, blocks, 1))
        data[:, :, at : at + 2] = d.astype(np.float16).view(np.uint8).reshape(rows, blocks, 2)
    if qtype.name == "MXFP4":
        data[:, :, 0] = rng.integers(110, 118, (rows, blocks))
    flat = torch.from_numpy(data.reshape(rows, -1)).to(device)
    return QuantTensor(qtype, Layout.FILE, (rows, columns), {"data": flat})


def make_tokens(tokens, columns, device):
    """Tokens of different size, with outliers, so that each scale and mean matters."""
    x = torch.randn(tokens, columns) * 10.0 ** torch.linspace(-2, 1, tokens)[:, None]
    x[:, ::97] *= 50
    return x.half().to(device)


def make_massive(tokens, columns, device):
    """A residual before and after an update that gives or takes the massive activation of a row.

    As in trained models: a channel of 1e4 where the others are of size 0.3. Of three rows each, one
    gets it, one keeps it, and one loses it; other rows have neither.
    """
    after = 0.3 * torch.randn(tokens, columns)
    before = after + 0.1 * torch.randn(tokens, columns)
    after[0::12, 7] = after[4::12, 7] = 1e4
    before[4::12, 7] = before[8::12, 7] = -1e4
    return before.to(device), after.to(device)


def relative_error(actual, expected):
    return ((actual.double().cpu() - expected).norm(dim=1) / expected.norm(dim=1)).max().item()


def pooled_error(actual, expected, x):
    """The error over all tokens, each normalised: a single product may be near zero by chance."""
    size = x.double().cpu().norm(dim=1, keepdim=True)
    return (((actual.double().cpu() - expected) / size).norm() / (expected / size).norm()).item()


def check_dependent_launches(op, qtype, tokens, device):
    """Each product reads the result of the one before: 50 replays, bits of direct launches."""
    is_dependent = torch.cuda.get_device_capability() >= (9, 0)
    parts = [make_weight(qtype, 1024, 1024, device, seed) for seed in range(4)]
    weights = [prepare_packed(p, Layout.SOA, is_dependent=is_dependent) for p in parts]
    start = make_tokens(tokens, 1024, device) * 0.01

    def chain(y, weights):
        for weight in weights:
            for _ in range(3):  # results of some types are too small for float16 after two products
                y = op(y, weight)
                y = y / y.abs().amax(dim=1, keepdim=True)
        return y

    x = start.clone()
    chain(x, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x, weights)
    plain = [prepare_packed(p, Layout.SOA) for p in parts]
    for step in range(50):
        x.copy_(start * (1 + step / 50))
        graph.replay()
        assert out.isfinite().all()
        assert torch.equal(out, chain(x, plain))
