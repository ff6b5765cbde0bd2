"""linear_group by a ring in shared memory: its CUDA source lane by lane on a processor."""

from dataclasses import replace

import pytest
import torch

from tests.ops.test_linear_group import (
    HALF,
    HEAD,
    LIMIT,
    check,
    floats,
    make_bf16,
    make_chain,
    make_fp8,
    make_q8,
    make_x,
    wanted,
)
from tests.ops.test_linear_group import run as run_group
from tiercel.kernels.block import linear_group as group_kernel
from tiercel.kernels.block import linear_group_stream as kernel
from tiercel.kernels.block.linear_group import GroupInput, LinearGroupConfig
from tiercel.kernels.block.linear_group_stream import LinearStreamConfig, StreamGroup
from tiercel.ops import linear_group as op
from tiercel.ops.linear_group import GroupMatrix

SMALL = LinearStreamConfig(3, 2)
BULK = SMALL._replace(has_bulk_x=True)


@pytest.fixture
def on_kernel(on_processor):
    """The CUDA source on a processor; its outputs are those of a CPU's tensors."""
    return on_processor


def make_group(x, matrices, given):
    """A group with results in poisoned memory between guards, its results and the guards."""
    guards = [
        torch.full((x.shape[0] + 2, one.out_rows + 7), float("nan"), dtype=one.out_dtype)
        for one in matrices
    ]
    outs = [guard[1:-1, 3:-4] for guard in guards]
    planes = [op._planes(one, out) for one, out in zip(matrices, outs, strict=True)]
    return StreamGroup(x, planes, given), outs, guards


def check_guards(outs, guards):
    for out, guard in zip(outs, guards, strict=True):
        out.fill_(float("nan"))
        assert guard.isnan().all()


def run(x, matrices, config=SMALL, num_sms=3, norm=None, rotation=None, limit=None):
    positions, table, head_dim = rotation or (None, None, 1)
    given = GroupInput(norm, None if table is None else (positions, table), head_dim, limit)
    group, outs, guards = make_group(x, matrices, given)
    kernel.launch_linear_stream(group, config, num_sms)
    results = [out.clone() for out in outs]
    check_guards(outs, guards)
    return results


def formats(columns):
    return [
        *floats(make_fp8((133, columns))),
        GroupMatrix(make_bf16((40, columns))),
        *floats(make_fp8((17, columns), (1, 128), has_e8m0=False)),
        *floats(make_fp8((70, columns), (16, 128)), is_pair=True),
    ]


# A CTA with parts of several matrices, and CTAs that have nothing; warps of a tile from 8 to 1.
@pytest.mark.usefixtures("on_kernel")
@pytest.mark.parametrize(
    ("columns", "num_tokens", "num_sms", "config"),
    [
        pytest.param(2176, 5, 3, SMALL, marks=pytest.mark.slow),
        (1152, 8, 2, LinearStreamConfig(2, 1, 16)),
        pytest.param(256, 1, 40, LinearStreamConfig(4, 4), marks=pytest.mark.slow),
        (640, 3, 1, LinearStreamConfig(5, 3, has_bulk_x=True)),
    ],
    ids=str,
)
def test_formats_have_the_bits_of_linear_group(columns, num_tokens, num_sms, config):
    matrices, x = formats(columns), make_x(num_tokens, columns)
    found = run(x, matrices, config, num_sms, limit=LIMIT)
    check(found, wanted(x, matrices, limit=LIMIT))
    parts = group_kernel.parts_of(columns)
    apart = run_group(x, matrices, LinearGroupConfig(parts, 8 // parts, 2, 2), limit=LIMIT)
    assert all(torch.equal(one, other) for one, other in zip(found, apart, strict=True))


def test_x_is_normed_or_rotated_after_the_wait(on_kernel):
    norm = (torch.randn(256), 1e-5)
    matrices = floats(make_fp8((100, 256)))
    table = torch.randn(9, 2, HALF)
    rotation = (torch.tensor([3, 8]), table, HEAD)
    grouped = floats(make_fp8((384, 256)), num_groups=3)
    for seed, (wide, group, options) in enumerate(
        ((256, matrices, {"norm": norm}), (768, grouped, {"rotation": rotation}))
    ):
        on_kernel.seed = seed
        x = torch.randn(2, wide).bfloat16()
        for config in (SMALL, BULK):
            kept = x.clone()
            on_kernel.late = [x]
            # Three groups of 128 rows: CTAs with one part of x, and with two.
            found = run(x, group, config, num_sms=4 if config is SMALL else 2, **options)
            check(found, wanted(kept, group, **options))


def run_chain(x, first, following, config, num_sms, rotation):
    given, then = op._given(None, rotation, LIMIT), op._given(following.norm, None, LIMIT)
    one, outs, guards = make_group(x, first, given)
    source = torch.full((x.shape[0], first[following.source].out_rows), float("nan")).bfloat16()
    outs[following.source] = source
    planes = list(one.matrices)
    planes[following.source] = op._planes(first[following.source], source)
    two, others, more = make_group(source, following.matrices, then)
    kernel.launch_linear_stream(
        one._replace(matrices=planes), config, num_sms, (two, following.tickets)
    )
    results = [out.clone() for out in (*outs, *others)]
    del outs[following.source], guards[following.source]
    check_guards((*outs, *others), (*guards, *more))
    assert not following.tickets.any()
    return results


@pytest.mark.parametrize(
    "kind", ["queries", "output", pytest.param("shared expert", marks=pytest.mark.slow)]
)
def test_a_chain_has_the_bits_of_two_launches(kind, on_kernel):
    x, first, following, rotation = make_chain(kind)
    x = x.contiguous()
    others = [one for one in following.matrices if not isinstance(one.weight, op.Q8Planes)]
    following = replace(following, matrices=others)
    apart = run_group(x, first, num_sms=3, rotation=rotation, limit=LIMIT)
    source = apart[following.source].contiguous()
    apart += run_group(source, others, num_sms=3, norm=following.norm)
    for seed, num_sms, config in ((1, 3, SMALL), (2, 5, BULK)):
        on_kernel.seed = seed
        on_kernel.late = [x]
        found = run_chain(x, first, following, config, num_sms, rotation)
        for one, other in zip(found, apart, strict=True):
            assert torch.equal(one, other)


def test_rings_of_flash_and_pro():
    """8 tokens of all matrices but Pro's wo_b leave room for a ring, which fits with its x."""
    widths = {
        "queries": ((4096, 1024), True),
        "output": ((4096, 8192), False),
        "shared": ((4096, 2048), False),
        "queries of Pro": ((7168, 1536), True),
    }
    for columns, has_norm in widths.values():
        for num_tokens in range(1, 9):
            config = kernel.select_linear_stream(columns, num_tokens, has_norm=has_norm)
            assert config is not None
            assert config.ahead <= config.stages <= 16
            smem = kernel.smem_bytes(columns, num_tokens, config, has_norm=has_norm)
            assert smem <= group_kernel.CTA_BYTES
    assert kernel.select_linear_stream((16384,), 8, has_norm=False) is None
    assert kernel.select_linear_stream((16384,), 1, has_norm=False) is not None


def test_q8_is_refused():
    x = make_x(1, 256)
    group, _, _ = make_group(x, [GroupMatrix(make_q8((16, 256)))], GroupInput())
    assert kernel.stream_refusal(group.matrices) == "a matrix is in Q8_0"
