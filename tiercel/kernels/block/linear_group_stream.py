"""What `linear_group` does, by one CTA a multiprocessor that streams its share of all weights.

cuda/block/linear_group_stream.cu: weights come by bulk copies through a ring in shared memory, so
the memory is busy while x is normed and staged, and while the CTAs wait for each other between two
groups. Each CTA owns as many bytes as every other, in whole rows. Sums have the order of
`linear_group`, so bits are the same.

Floor: the planes once, x once for each CTA from L2, the results once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, NamedTuple

from torch import Tensor

from tiercel.kernels.block.linear_group import (
    CTA_BYTES,
    H200_SMS,
    KINDS,
    NORMED,
    PLAIN,
    TILE_ROWS,
    UNIT_BYTES,
    GroupInput,
    GroupPlanes,
    GroupStruct,
    has_half_x,
    input_of,
    matrix_of,
    parts_of,
)
from tiercel.kernels.runtime import rtc

CAPABILITY: Final = (9, 0)  # with bulk copies and the shared memory of CTA_BYTES
WARPS: Final = 8  # that multiply
AHEAD: Final = 4  # stages on their way: 64 KB, more than the memory delivers within its latency
_PRODUCERS: Final = 4  # warps that request weights
_MOST_STAGES: Final = 16
_LEAST_STAGES: Final = 3
_BARRIER_BYTES: Final = 384
_SUM_BYTES: Final = 2 * 512  # of a warp, in two buffers


class LinearStreamConfig(NamedTuple):
    """A launch.

    Attributes:
        stages: of the ring.
        ahead: of them on their way at a time, at most.
        warps: that multiply.
        ctas: that a multiprocessor has room for: with two, the next launch's first weights come
            while this one multiplies.
        has_bulk_x: whether x of the first group comes by bulk copies.
    """

    stages: int
    ahead: int
    warps: int = WARPS
    ctas: int = 1
    has_bulk_x: bool = False


class StreamGroup(NamedTuple):
    """A group of a launch.

    Attributes:
        x: (tokens, groups * columns) bfloat16; rows a multiple of 16 bytes apart.
        matrices: 1 to `MAX_MATRICES`, of equal columns, each with rows; none in Q8_0.
        given: what happens to x.
    """

    x: Tensor
    matrices: Sequence[GroupPlanes]
    given: GroupInput

    @property
    def columns(self) -> int:
        """Of a matrix."""
        return self.matrices[0].weights.shape[1]


def smem_bytes(
    columns: Sequence[int], num_tokens: int, config: LinearStreamConfig, *, has_norm: bool
) -> int:
    """Dynamic shared memory of a CTA: barriers, ring, sums, weights of a norm, x.

    columns: of the matrices of each group.
    """
    most = max(columns)
    stage = max(
        TILE_ROWS * config.warps // parts * (UNIT_BYTES * parts + 64)
        for parts in map(parts_of, columns)
    )
    x_bytes = num_tokens * (2 * most + 16) + 4 * most * has_norm
    return _BARRIER_BYTES + config.stages * stage + config.warps * _SUM_BYTES + x_bytes


def select_linear_stream(
    columns: Sequence[int], num_tokens: int, *, has_norm: bool
) -> LinearStreamConfig | None:
    """The launch of one group or two, None where x leaves no room for a ring. Pure.

    Args:
        columns: of the matrices of each group.
        num_tokens: rows of x.
        has_norm: whether x of one of them is normed.
    """
    for stages in range(_MOST_STAGES, _LEAST_STAGES - 1, -1):
        config = LinearStreamConfig(stages, min(AHEAD, stages))
        if smem_bytes(columns, num_tokens, config, has_norm=has_norm) <= CTA_BYTES:
            return config
    return None


@functools.cache
def cuda_source(
    kinds: int,
    kind_of_input: int,
    parts: int,
    config: LinearStreamConfig,
    following: tuple[int, int, int] | None = None,
    *,
    has_half: bool = False,
) -> rtc.KernelSource:
    """The kernel for some formats, a bit each in the order of `KINDS`.

    following: formats, kind of input and parts of a second group. has_half: of `has_half_x`.
    """
    next_kinds, next_input, next_parts = following or (0, PLAIN, 0)
    macros = (
        ("IS_BF16", 1),
        ("HALF_X", int(has_half)),
        ("KINDS", kinds),
        ("PARTS", parts),
        ("TILES", config.warps // parts),
        ("STAGES", config.stages),
        ("AHEAD", config.ahead),
        ("CTAS", config.ctas),
        ("BULK_X", int(config.has_bulk_x)),
        ("INPUT", kind_of_input),
        ("NEXT_KINDS", next_kinds),
        ("NEXT_PARTS", next_parts),
        ("NEXT_INPUT", next_input),
    )
    return rtc.KernelSource("linear_group_stream", macros)


def _place(matrices: Sequence[GroupPlanes], num_ctas: int) -> tuple[GroupStruct, int]:
    """A group in equal shares of its bytes, and the formats' bits."""
    group, first, kinds = GroupStruct(count=len(matrices)), 0, 0
    for place, planes in enumerate(matrices):
        group.matrices[place] = matrix_of(planes, first_unit=first)
        first += planes.weights.nbytes // UNIT_BYTES
        kinds |= 1 << planes.kind
    # Whole CTAs for each part of x, if there are several: none waits for a second one.
    parts = max(planes.num_groups for planes in matrices)
    group.each, group.more = divmod(first, num_ctas - num_ctas % parts or num_ctas)
    return group, kinds


def launch_linear_stream(
    first: StreamGroup,
    config: LinearStreamConfig,
    num_sms: int = H200_SMS,
    second: tuple[StreamGroup, Tensor] | None = None,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        first: a group.
        config: from `select_linear_stream`.
        num_sms: multiprocessors of the device.
        second: a group whose x is a result of the first; (2,) int32 zeros, which are zeros again
            afterwards.
    """
    num_tokens = first.x.shape[0]
    if num_tokens == 0:
        return
    groups = [first] if second is None else [first, second[0]]
    columns = [group.columns for group in groups]
    forms = []
    arguments: list[object] = []
    for group in groups:
        placed, kinds = _place(group.matrices, num_sms)
        arguments += [placed, input_of(group.x, group.columns, group.given)]
        forms.append((kinds, group.given.kind_for(group.matrices), parts_of(group.columns)))
    if second is not None:
        arguments.append(rtc.pointer(second[1]))
    has_norm = any(kind == NORMED for _, kind, _ in forms)
    has_half = has_half_x(first.x.device)
    source = cuda_source(*forms[0], config, forms[1] if second else None, has_half=has_half)
    smem = smem_bytes(columns, num_tokens, config, has_norm=has_norm)
    rtc.launch(
        rtc.load_kernel(source, first.x.device, smem),
        num_sms,
        32 * (config.warps + _PRODUCERS),
        arguments,
        is_dependent=rtc.is_dependent(first.x.device),
        is_cooperative=second is not None,
    )


def stream_refusal(matrices: Sequence[GroupPlanes]) -> str:
    """Why no ring takes some matrices; "" if it does."""
    if any(planes.kind == KINDS.index("Q8_0") for planes in matrices):
        return "a matrix is in Q8_0"
    if any(planes.scales is not None and planes.block[1] != UNIT_BYTES for planes in matrices):
        return f"scales are not of {UNIT_BYTES} columns each"
    return ""
