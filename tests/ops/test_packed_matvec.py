"""The product with quantised weights: against the oracle, and each token's bits its own."""

import pytest
import torch

from tests.packed_weights import (
    LAYOUTS,
    check_dependent_launches,
    make_tokens,
    make_weight,
    pooled_error,
)
from tiercel.errors import ArgumentError
from tiercel.kernels.packed import packed_matvec as kernel
from tiercel.ops.dequantize import dequantize
from tiercel.ops.packed_matvec import MAX_TOKENS, packed_matvec, prepare_packed
from tiercel.quant import QuantTensor
from tiercel.quant_types import PLANES, Layout, QuantType
from tiercel.reference import packed_matvec as oracle
from tiercel.resting import select_form

TYPES = list(PLANES)
SMALL_BLOCKS = [qtype for qtype in TYPES if qtype.block_weights == 32]
# Float32 sums of exact operands. Q6_K: scale * (q - 32) keeps 11 bits, so half of the weights are
# rounded, by 2**-12 at most. CPUs multiply the decoded float32 weights.
TOLERANCE = dict.fromkeys(TYPES, 3e-6) | {QuantType.Q6_K: 3e-4}
# Of one result, by the root of its squared products. 3e-5 was seen on an H200, with types whose
# operands can be small integers beside an outlier of x: tensor cores seem to align products by the
# exponents of operands, and these are subnormals. Other types keep four times the tolerance.
WORST = {qtype: 4 * limit for qtype, limit in TOLERANCE.items()} | {
    QuantType[name]: 1e-4 for name in ("IQ4_NL", "IQ4_XS", "Q8_0", "Q4_1", "Q5_1", "Q2_K")
}
# (rows, columns): one row, less than a tile, a row more than one, uneven tiles; fewer units than
# warps, more, a slice and a bit.
SHAPES = [(1, 256), (15, 512), (17, 1024), (53, 2304), (18, 4352)]
# Rows that end within a unit: in or after its first group of four blocks, or its second.
ODD_SHAPES = [(16, 32), (17, 96), (1, 128), (15, 160), (33, 576), (18, 640), (16, 4320), (20, 4544)]
CASES = [(shape, qtype) for qtype in TYPES for shape in SHAPES]
CASES += [(shape, qtype) for qtype in SMALL_BLOCKS for shape in ODD_SHAPES]


@pytest.mark.parametrize(("shape", "qtype"), CASES, ids=str)
def test_matches_oracle(shape, qtype, device):
    rows, columns = shape
    part = make_weight(qtype, rows, columns, device)
    x = make_tokens(5, columns, device)
    expected = oracle.packed_matvec(x, part.planes["data"], qtype.name)
    for layout in LAYOUTS:
        weight = prepare_packed(part, layout)
        wide = torch.full((7, rows + 3), float("nan"), device=device)
        out = packed_matvec(x, weight, out=wide[1:6, 2 : rows + 2])
        assert out.data_ptr() == wide[1:6, 2:].data_ptr()
        assert pooled_error(out, expected, x) < TOLERANCE[qtype]
        wide[1:6, 2 : rows + 2] = float("nan")
        assert wide.isnan().all()  # nothing beside the result was written


LONG = [(qtype, columns) for qtype in TYPES for columns in (512, 4096, 12288)]
SHORT = [(qtype, columns) for qtype in SMALL_BLOCKS for columns in (32, 576, 640)]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 1024])
@pytest.mark.parametrize(("qtype", "columns"), LONG + SHORT, ids=str)
def test_every_size_matches_decoded_weights(rows, columns, qtype, device):
    """Each result alone, against the size of its terms: one of them may be near zero."""
    part = make_weight(qtype, rows, columns, device)
    dense = dequantize(part, torch.float32).double().cpu()
    weights = [prepare_packed(part, layout) for layout in LAYOUTS]
    for tokens in (1, 2, 3, 8, 9, 16):
        x = make_tokens(tokens, columns, device)
        exact = x.double().cpu()
        expected, size = exact @ dense.t(), (exact**2 @ (dense**2).t()).sqrt()
        for weight in weights:
            out = torch.full((tokens, rows), float("nan"), device=device)
            packed_matvec(x, weight, out=out)
            error = (out.double().cpu() - expected).abs() / size
            assert error.max().item() < WORST[qtype]


ODD = [((37, 608), qtype) for qtype in SMALL_BLOCKS] + [
    ((20, 4416), qtype) for qtype in SMALL_BLOCKS
]


@pytest.mark.parametrize(
    ("shape", "qtype"),
    [(shape, q) for q in TYPES for shape in ((37, 1280), (20, 4096), (24, 12288))] + ODD,
    ids=str,
)
def test_a_tokens_bits_are_its_own(shape, qtype, device):
    """Alone, in every batch of up to 16, at every place, from both layouts: bit by bit."""
    rows, columns = shape
    part = make_weight(qtype, rows, columns, device)
    x = make_tokens(MAX_TOKENS, columns, device)
    weight = prepare_packed(part, Layout.SOA)
    file_weight = prepare_packed(part, Layout.FILE)
    whole = packed_matvec(x, weight, torch.float32)
    for tokens in range(1, MAX_TOKENS + 1):
        first = packed_matvec(x[:tokens], weight, torch.float32)
        assert torch.equal(first, whole[:tokens])
        last = packed_matvec(x[-tokens:], file_weight, torch.float32)
        assert torch.equal(last, whole[-tokens:])


@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_every_launch_sums_in_one_order(qtype, device):
    """What `select_packed_matvec` may change between shapes does not change a bit."""
    if device.type == "cpu":
        pytest.skip("launches differ on a GPU alone")
    part = make_weight(qtype, 70, 8448, device)
    weight = prepare_packed(part, Layout.SOA)
    x = make_tokens(4, 8448, device)
    expected = packed_matvec(x, weight, torch.float32)
    for groups, stages, early, buffers, is_split in (
        (1, 1, 1, 1, False),
        (2, 2, 1, 1, True),
        (1, 4, 4, 2, True),
        (2, 1, 1, 2, False),
    ):
        for grid in (1, 2):
            config = kernel.make_config(
                qtype.name, 33, 4, groups, stages, early, buffers, 1, grid, is_split=is_split
            )
            out = torch.full((4, 70), float("nan"), device=device)
            partial = torch.full((3, 4, 80), float("nan"), device=device)
            kernel.launch_packed_matvec(
                x,
                weight.tensor.ordered_planes(),
                qtype.name,
                out,
                partial,
                weight.tickets,
                config,
                is_dependent=False,
            )
            assert torch.equal(out, expected)
            assert not weight.tickets.any()  # ready for the next launch


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_dependent_launches_in_a_graph(qtype, device):
    check_dependent_launches(packed_matvec, qtype, 2, device)


# An H200, a device with 99 KiB a CTA (sm_89, sm_120), one with few multiprocessors.
LIMITS = (kernel.H200, kernel.DeviceLimits(142, 99 << 10), kernel.DeviceLimits(20, 163 << 10))


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_configs_fit_every_shape(qtype, limits):
    """Every model's matrices get a launch that fits an SM; a class of tokens has one kernel."""
    for rows in (1, 576, 1024, 4096, 6144, 24576, 151936):
        for columns in (256, 576, 640, 1024, 1536, 2048, 4096, 5120, 9728, 12288, 17408, 25600):
            for tokens in range(1, MAX_TOKENS + 1):
                config = kernel.select_packed_matvec(qtype.name, (rows, columns), tokens, limits)
                assert config.smem_bytes <= limits.smem_bytes
                assert 1 <= config.early <= config.stages
                assert 0 < config.grid * config.groups < rows / 16 + 1 + config.groups
                assert config.grid <= config.ctas * limits.num_sms
                assert config.parts == (4 if columns <= 1024 else 8)
                most = kernel.token_class(tokens, qtype.name, limits)
                assert most >= min(tokens, 4 if qtype is QuantType.Q8_0 else 8)  # large units
                assert (
                    kernel.select_packed_matvec(qtype.name, (rows, columns), most, limits) == config
                )


def test_no_tokens(device):
    weight = prepare_packed(make_weight(QuantType.Q4_K, 17, 256, device), Layout.SOA)
    assert packed_matvec(torch.empty(0, 256).half().to(device), weight).shape == (0, 17)


def test_wrong_arguments(device):
    part = make_weight(QuantType.Q4_K, 17, 512, device)
    weight = prepare_packed(part, Layout.SOA)
    x = torch.zeros(2, 512, dtype=torch.float16, device=device)
    for bad in (x.float(), x[:, :256], x.repeat(9, 1), x[0], x.t().contiguous().t()):
        with pytest.raises(ArgumentError, match="packed_matvec: x is"):
            packed_matvec(bad, weight)
    for bad in (torch.zeros(2, 16), torch.zeros(17, 2).t(), torch.zeros(2, 17).double()):
        with pytest.raises(ArgumentError, match="packed_matvec: out is"):
            packed_matvec(x, weight, out=bad.to(device))
    empty = QuantTensor(part.qtype, part.layout, (0, 512), {"data": part.planes["data"][:0]})
    with pytest.raises(ArgumentError, match="is not read here"):
        prepare_packed(empty, Layout.SOA)
    dense = QuantTensor(QuantType.F16, Layout.FILE, (1, 4), {"data": part.planes["data"][:1, :8]})
    with pytest.raises(ArgumentError, match="F16 of shape"):
        prepare_packed(dense, Layout.SOA)


def test_forms_and_types_agree():
    """This op reads all types that `linear` keeps packed."""
    packed = {q for q in QuantType if select_form(q, (64, 256), "float16", "cuda") == "packed"}
    assert packed == set(TYPES)


@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
def test_both_layouts_decode_alike(qtype, device):
    part = make_weight(qtype, 21, 768 if qtype not in SMALL_BLOCKS else 736, device)
    weight = prepare_packed(part, Layout.SOA).tensor
    plain = part.to(torch.device("cpu"))
    for dtype in kernel.OUT_CODES:
        expected = dequantize(plain, dtype).view(torch.uint8)
        for tensor in (weight, part):
            assert torch.equal(dequantize(tensor, dtype).cpu().view(torch.uint8), expected)
