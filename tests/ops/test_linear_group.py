"""Products of several matrices with one x: the op, and its CUDA source lane by lane on a processor.

On a machine with a GPU the op's own tests run the kernel there.
"""

from dataclasses import replace

import pytest
import torch

from tests.dsv4_cases import blocks_of, captured
from tiercel.errors import ArgumentError
from tiercel.kernels.block import linear_group as kernel
from tiercel.kernels.block.linear_group import GroupInput, LinearGroupConfig
from tiercel.kernels.block.q8_planes import Q8Planes
from tiercel.ops import linear_group as op
from tiercel.ops.block_quantize import block_quantize
from tiercel.ops.dequantize import dequantize
from tiercel.ops.linear_group import GroupMatrix, linear_group, matrix_refusal
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.reference import linear_group as oracle

FP8 = QuantType.FP8_BLOCK
EXACT = 1e-5  # of norms, float32 results
ROUNDED = 3e-3  # of norms, bfloat16 results or inputs
LIMIT, HEAD, HALF = 0.5, 64, 8


def make_fp8(shape, block=(128, 128), device="cpu", *, has_e8m0=True):
    weight = torch.randn(shape, device=device) / shape[1] ** 0.5
    return block_quantize(weight, FP8, block=block, has_e8m0=has_e8m0)


def make_q8(shape, device="cpu"):
    """Each int8, the least ones too."""
    q = torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
    scale = torch.rand(shape[0], shape[1] // 32, device=device) / 64 / shape[1] ** 0.5
    return Q8Planes(q, scale.half())


def make_bf16(shape, device="cpu"):
    return (torch.randn(shape, device=device) / shape[1] ** 0.5).bfloat16()


def make_x(num_tokens, columns, device="cpu"):
    """Rows with a gap of 8 elements after each, of NaN."""
    wide = torch.full((num_tokens, columns + 8), float("nan"), device=device).bfloat16()
    wide[:, :columns] = torch.randn(num_tokens, columns, device=device)
    return wide[:, :columns]


def decoded(weight):
    if isinstance(weight, Q8Planes):
        return weight.dense(torch.float32).cpu()
    return (
        weight.float().cpu()
        if isinstance(weight, torch.Tensor)
        else (dequantize(weight, torch.float32).cpu())
    )


def wanted(x, matrices, norm=None, rotation=None, limit=None):
    """The oracle's results; x is rounded after a norm or rotation, as the op says."""
    x = x.cpu()
    if norm is not None:
        x = oracle.norm(x, norm[0].cpu(), norm[1]).bfloat16()
    if rotation is not None:
        positions, table, head_dim = rotation
        x = oracle.rotate_back(x, positions.cpu(), table.cpu(), head_dim).bfloat16()
    return [
        oracle.product(
            x,
            decoded(m.weight),
            m.num_groups,
            is_pair=m.is_pair,
            limit=limit,
            addend=None if m.addend is None else m.addend.cpu(),
        )
        for m in matrices
    ]


def relative_error(actual, expected):
    return ((actual.double().cpu() - expected).norm() / expected.norm()).item()


def run(x, matrices, config=None, num_sms=132, norm=None, rotation=None, limit=None):
    """The results of a launch in poisoned memory with guards; all configs are right."""
    guards = []
    for matrix in matrices:
        shape = (x.shape[0] + 2, matrix.out_rows + 7)
        guards.append(torch.full(shape, float("nan"), dtype=matrix.out_dtype, device=x.device))
    outs = [guard[1:-1, 3:-4] for guard in guards]
    planes = [op._planes(matrix, out) for matrix, out in zip(matrices, outs, strict=True)]
    positions, table, head_dim = rotation or (None, None, 1)
    given = GroupInput(norm, None if table is None else (positions, table), head_dim, limit)
    columns = matrices[0].weight.shape[-1]
    tiles = [one.num_tiles for one in planes]
    config = config or kernel.select_linear_group(columns, tiles, x.shape[0])
    kernel.launch_linear_group(x, planes, given, config, num_sms)
    results = [out.clone() for out in outs]
    for out, guard in zip(outs, guards, strict=True):
        out.fill_(float("nan"))
        assert guard.isnan().all()
    return results


def check(results, expected, tolerance=EXACT):
    for result, one in zip(results, expected, strict=True):
        limit = ROUNDED if result.dtype == torch.bfloat16 else tolerance
        assert relative_error(result, one) <= limit


def floats(*weights, **options):
    return [GroupMatrix(weight, out_dtype=torch.float32, **options) for weight in weights]


# Units of a warp: several, the last ones missing for some warps; tiles beyond the last row.
CONFIGS = [
    (LinearGroupConfig(8, 1, 2, 3), 132),
    (LinearGroupConfig(2, 4, 3, 1), 2),
    (LinearGroupConfig(1, 3, 2, 1), 5),
]


@pytest.fixture
def on_kernel(on_processor):
    """The CUDA source on a processor; its outputs are those of a CPU's tensors."""
    return on_processor


@pytest.fixture(params=[False, True], ids=["bfloat16", "float16"])
def _in_both_types(request, monkeypatch):
    """E4M3 is multiplied in bfloat16, as before sm_89, and in float16."""
    monkeypatch.setattr(kernel, "HALF_X", request.param)


@pytest.mark.usefixtures("on_kernel")
@pytest.mark.parametrize(("config", "num_sms"), CONFIGS, ids=str)
def test_formats_match_oracle(config, num_sms):
    """A CTA for each block, and CTAs that go through several."""
    num_tokens, columns = 5, 640
    matrices = floats(
        make_fp8((133, columns)),
        make_bf16((40, columns)),
        make_fp8((16, columns), (1, 256), has_e8m0=False),
        make_q8((24, columns)),
    )
    matrices[1] = replace(matrices[1], out_dtype=torch.bfloat16)
    x = make_x(num_tokens, columns)
    check(run(x, matrices, config, num_sms), wanted(x, matrices))


@pytest.mark.usefixtures("on_kernel")
def test_a_norm_goes_before_the_products():
    x = make_x(3, 256)
    x[1] *= 1e-3  # so small that eps decides
    norm = (torch.randn(256), 1e-4)
    matrices = floats(make_fp8((40, 256)), make_q8((17, 256)))
    found = run(x, matrices, norm=norm)
    # A value between two bfloat16 may go to the other one.
    check(found, wanted(x, matrices, norm=norm), ROUNDED)


@pytest.mark.usefixtures("on_kernel")
@pytest.mark.parametrize("make", [make_fp8, make_q8, make_bf16])
def test_groups_behind_the_inverse_rotation(make):
    table = torch.randn(50, 2, HALF)
    rotation = (torch.tensor([3, 49, 0]), table, HEAD)
    matrices = floats(make((384, 128)), num_groups=3)
    x = make_x(3, 3 * 128)
    one_cta = LinearGroupConfig(1, 8, 2, 1)  # goes from group to group
    found = run(x, matrices, one_cta, num_sms=1, rotation=rotation)
    check(found, wanted(x, matrices, rotation=rotation), ROUNDED)
    (short,) = run(x, matrices, rotation=(rotation[0].int(), table, HEAD))
    assert torch.equal(short, found[0])


@pytest.mark.usefixtures("on_kernel")
@pytest.mark.parametrize("limit", [None, LIMIT])
def test_pairs_and_addends(limit):
    x = make_x(7, 256)
    addend = torch.randn(7, 33)[:, :21]
    weights = [make_fp8((42, 256), (1, 128)), make_q8((42, 256)), make_bf16((42, 256))]
    matrices = [*floats(*weights, is_pair=True), *floats(make_fp8((21, 256)), addend=addend)]
    found = run(x, matrices, limit=limit)
    check(found, wanted(x, matrices, limit=limit))
    unclamped = wanted(x, matrices)
    assert (relative_error(found[1], unclamped[1]) > 0.01) == (limit is not None)


@pytest.mark.usefixtures("on_kernel", "_in_both_types")
def test_every_number_of_e4m3_and_scale():
    """Each finite E4M3 by itself, subnormal ones too, then scales of 2^-127 to 2^120 and NaN."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = torch.where(numbers.float().isnan(), 0.0, numbers.float())
    q = torch.zeros(256, 128)
    q[:, 77] = values
    one = torch.full((2, 1), 127, dtype=torch.uint8)
    (found,) = run(
        torch.ones(1, 128).bfloat16(), floats(blocks_of(FP8, q.to(torch.float8_e4m3fn), one))
    )
    assert torch.equal(found[0], values)
    powers = torch.arange(0, 248, 8, dtype=torch.uint8)
    powers[5] = 255
    ones = torch.ones(31, 128).to(torch.float8_e4m3fn)
    weight = blocks_of(FP8, ones, powers[:, None].contiguous(), block=(1, 128))
    (found,) = run(torch.full((1, 128), 2.0**-7).bfloat16(), floats(weight))
    expected = torch.exp2(powers.double() - 127).float()
    expected[5] = float("nan")
    torch.testing.assert_close(found[0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("on_kernel", "_in_both_types")
def test_tokens_of_any_magnitude():
    """A token beside much larger and smaller ones, and one of zeros, NaN and infinity."""
    x = make_x(6, 256)
    x[:4] *= torch.tensor([2.0**-100, 2.0**60, 1.0, 0.0])[:, None]
    x[4, 7], x[5, 9] = float("nan"), float("inf")
    matrices = floats(make_fp8((40, 256)))
    found = run(x, matrices)[0]
    expected = wanted(x[:4], matrices)[0]
    for token in range(3):
        assert relative_error(found[token], expected[token]) <= EXACT
    assert not found[3].any()
    assert found[4].isnan().all()
    assert not found[5].isfinite().any()


@pytest.mark.usefixtures("on_kernel")
def test_every_int8():
    q = torch.zeros(256, 128, dtype=torch.int8)
    q[:, 77] = torch.arange(-128, 128, dtype=torch.int8)
    (found,) = run(torch.ones(1, 128).bfloat16(), floats(Q8Planes(q, torch.ones(256, 4).half())))
    assert torch.equal(found[0], torch.arange(-128.0, 128.0))


@pytest.mark.usefixtures("on_kernel")
def test_bits_do_not_depend_on_the_number_of_tokens():
    matrices = floats(make_fp8((24, 512)), make_q8((24, 512)), make_bf16((24, 512)))
    x = make_x(8, 512)
    norm = (torch.randn(512), 1e-6)
    every = run(x, matrices, norm=norm)
    for first, last in ((0, 1), (3, 6)):
        some = run(x[first:last], matrices, num_sms=1, norm=norm)
        for one, whole in zip(some, every, strict=True):
            assert torch.equal(one, whole[first:last])


def test_x_is_read_after_the_wait(on_kernel):
    matrices = floats(make_fp8((24, 256)))
    x = torch.randn(2, 256).bfloat16()
    for norm in (None, (torch.randn(256), 1e-6)):
        in_time = run(x, matrices, norm=norm)
        kept = x.clone()
        x.fill_(float("nan"))
        on_kernel.late = [x.copy_(kept)]
        late = run(x, matrices, norm=norm)
        assert torch.equal(late[0], in_time[0])


def test_the_op_matches_oracle(device):
    """By PyTorch on a CPU, by the kernel on a GPU."""
    x = make_x(4, 256, device)
    matrices = [
        *floats(make_fp8((40, 256), device=device), make_q8((24, 256), device)),
        GroupMatrix(make_bf16((17, 256), device)),
        *floats(make_fp8((42, 256), (1, 128), device), is_pair=True),
        *floats(make_bf16((21, 256), device), addend=torch.randn(4, 21, device=device)),
    ]
    check(linear_group(x, matrices, limit=LIMIT), wanted(x, matrices, limit=LIMIT))
    norm = (torch.randn(256, device=device), 1e-5)
    found = linear_group(x, matrices, norm=norm, limit=LIMIT)
    check(found, wanted(x, matrices, norm=norm, limit=LIMIT), ROUNDED)
    table = torch.randn(9, 2, HALF, device=device)
    rotation = (torch.tensor([3, 8, 0, 1], device=device), table, HEAD)
    grouped = floats(make_fp8((384, 256), device=device), num_groups=3)
    wide = make_x(4, 3 * 256, device)
    found = linear_group(wide, grouped, rotation=rotation)
    check(found, wanted(wide, grouped, rotation=rotation), ROUNDED)
    out = torch.empty(4, 50, device=device)[:, 3:43]
    assert linear_group(x, [replace(matrices[0], out=out)])[0] is out
    assert linear_group(x[:0], matrices[:2])[1].shape == (0, 24)


def test_planes_of_q8_are_those_of_the_file(device):
    data = torch.randint(0, 256, (6, 3 * 34), dtype=torch.uint8, device=device)
    data.unflatten(1, (3, 34))[..., 1] &= 0x3F  # finite scales
    weight = QuantTensor(QuantType.Q8_0, Layout.FILE, (6, 96), {"data": data})
    planes = Q8Planes.of_file(data)
    assert planes.shape == (6, 96)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(planes.dense(dtype), dequantize(weight, dtype))


def test_refusals():
    def refusal(weight, **options):
        return matrix_refusal(GroupMatrix(weight, **options))

    assert refusal(make_fp8((384, 256)), num_groups=3) == ""
    assert "48 rows are not 3 groups" in refusal(make_fp8((48, 256)), num_groups=3)
    assert "no gate and up" in refusal(make_fp8((41, 256)), is_pair=True)
    assert "blocks of 64 columns" in refusal(make_fp8((48, 256), (1, 64)))
    assert "200 columns" in refusal(make_bf16((48, 200)))
    assert refusal(make_bf16((48, 192))) == ""
    assert "torch.float32" in refusal(torch.randn(4, 128))
    assert "MXFP4" in refusal(block_quantize(torch.randn(4, 128), QuantType.MXFP4))
    assert "do not begin at 16" in refusal(make_bf16((48, 260))[:, 4:])
    planes = make_q8((4, 256))
    odd = Q8Planes(planes.q, torch.ones(4, 9).half()[:, :8])
    assert "do not begin at 8" in refusal(odd)
    fp8 = make_fp8((4, 256), (1, 128))
    gaps = replace(fp8, planes=fp8.planes | {"scale": fp8.planes["scale"].mT.contiguous().mT})
    assert refusal(gaps) == "gaps between scales"
    assert refusal(make_bf16((0, 128))) == "there are no rows"
    assert "16384 columns of 8 tokens" in refusal(make_bf16((16, 16384)))
    x = torch.randn(9, 128).bfloat16()
    assert "9 tokens" in op.input_refusal(x)
    assert "torch.float32" in op.input_refusal(x.float())
    assert "multiples of 16 bytes" in op.input_refusal(torch.randn(3, 130).bfloat16())
    assert op.input_refusal(x[:8]) == ""


def test_the_toggle(monkeypatch):
    assert op.device_refusal(torch.device("cpu")) == "there is no kernel on cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    cuda = torch.device("cuda")
    assert op.device_refusal(cuda) == "the device has no products of bfloat16"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert op.device_refusal(cuda) == ""
    monkeypatch.setenv("TIERCEL_LINEAR_GROUP", "0")
    assert op.device_refusal(cuda) == "TIERCEL_LINEAR_GROUP=0"


def test_op_names_the_bad_argument():
    x = torch.randn(2, 256).bfloat16()
    matrix = GroupMatrix(make_bf16((24, 256)))
    with pytest.raises(ArgumentError, match="0 matrices"):
        linear_group(x, [])
    with pytest.raises(ArgumentError, match=r"x is torch\.float32"):
        linear_group(x.float(), [matrix])
    with pytest.raises(ArgumentError, match=r"x is \(2, 192\)"):
        linear_group(x[:, :192], [matrix])
    with pytest.raises(ArgumentError, match="first has 256 columns"):
        linear_group(x, [matrix, GroupMatrix(make_bf16((24, 128)))])
    with pytest.raises(ArgumentError, match=r"torch\.float16"):
        linear_group(x, [replace(matrix, out_dtype=torch.float16)])
    with pytest.raises(ArgumentError, match="a matrix") as error:
        linear_group(x, [replace(matrix, addend=torch.randn(2, 23))])
    assert "out and addend" in error.value.hint
    with pytest.raises(ArgumentError, match=r"norm's weight is \(255,\)"):
        linear_group(x, [matrix], norm=(torch.ones(255), 1e-6))
    with pytest.raises(ArgumentError, match="limit=0"):
        linear_group(x, [matrix], limit=0.0)
    rotation = (torch.zeros(2, dtype=torch.int64), torch.ones(3, 2, 8), 60)
    with pytest.raises(ArgumentError, match="heads of 60"):
        linear_group(x, [matrix], rotation=rotation)


# Columns of Flash and Pro.
@pytest.mark.parametrize("columns", [1024, 1536, 2048, 3072, 4096, 7168, 8192])
def test_launches_of_deepseek_v4(columns):
    """Each warp has two units or more, 8 tokens fit, and they have one order of sums."""
    for tiles in ([96], [16, 256], [2048]):
        configs = [kernel.select_linear_group(columns, tiles, tokens) for tokens in range(1, 9)]
        assert len({config.parts for config in configs}) == 1
        for num_tokens, config in enumerate(configs, 1):
            is_wide = 2 * (num_tokens * (2 * columns + 16) + 8 * 1024 + 1024) > 228 * 1024
            assert config.ctas == 1 if is_wide else config.ctas > 1
            assert config.parts * config.tiles == (16 if is_wide else 8)
            assert columns // kernel.UNIT_BYTES >= 2 * config.parts
    assert kernel.fits(columns, 8)


# Columns, tiles of 16 rows (pairs: 8), tokens; stages and CTAs (results/linear_group_h200.json).
CHOICES = [
    ("x of CSA", 4096, [96, 164], 1, (4, 2)),
    ("x of CSA", 4096, [96, 164], 8, (4, 2)),
    ("router, shared w1 and w3", 4096, [16, 256], 1, (2, 3)),
    ("router, shared w1 and w3", 4096, [16, 256], 4, (2, 3)),
    ("router, shared w1 and w3", 4096, [16, 256], 8, (2, 2)),
    ("shared w2", 2048, [256], 8, (4, 2)),
    ("wq_b and indexer wq_b", 1024, [2048, 512], 1, (2, 2)),
    ("wo_a", 4096, [512], 1, (2, 2)),
    ("wo_b", 8192, [256], 4, (4, 2)),
    ("wo_b", 8192, [256], 8, (2, 1)),
]


@pytest.mark.parametrize(("name", "columns", "tiles", "num_tokens", "wanted"), CHOICES)
def test_choices_of_flash(name, columns, tiles, num_tokens, wanted):
    config = kernel.select_linear_group(columns, tiles, num_tokens)
    assert (config.stages, config.ctas) == wanted
    most = min(2, wanted[1])
    assert kernel.select_linear_group(columns, tiles, num_tokens, has_q8=True)[2:] == (2, most)
    normed = kernel.select_linear_group(columns, tiles, num_tokens, kind_of_input=kernel.NORMED)
    assert normed.ctas == most


def test_ctas_are_shared_by_bytes():
    assert kernel.share_ctas([96, 164], [6, 21], 264) == [96, 164]
    assert kernel.share_ctas([1024, 256, 2], [32, 8, 0], 400) == [319, 80, 1]
    assert kernel.share_ctas([1024, 2], [32, 8], 400) == [320, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_shapes_of_flash(num_tokens, device):
    x = make_x(num_tokens, 4096, device)
    group = [
        GroupMatrix(make_fp8((1024, 4096), device=device)),
        GroupMatrix(make_fp8((512, 4096), device=device)),
        *floats(make_bf16((2624, 4096), device)),
    ]
    expected = wanted(x, group)
    found = linear_group(x, group)
    check(found, expected)
    for one, again in zip(found, captured(lambda: linear_group(x, group)), strict=True):
        assert torch.equal(one, again)
    for first in range(num_tokens):
        alone = linear_group(x[first : first + 1], group)
        assert all(torch.equal(a, b[first : first + 1]) for a, b in zip(alone, found, strict=True))
