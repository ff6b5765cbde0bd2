"""Launches Triton kernels at the cost of the launch alone, dependent on the one ahead where it may.

Triton's own call binds, specialises and hashes every argument each time: 9 us of the host, and a
prompt's step makes hundreds of them. Here a kernel takes tensors, then numbers, then constants; the
types of the tensors, whether they are aligned, and the constants name what was compiled, and a
launch after the first is a look-up. So numbers are never specialised (`do_not_specialize`): sizes
that a model fixes are constants.

Dependent launch: every kernel launched here begins with `wait_for_inputs`, before it touches
memory. Its CTAs may then be resident, and those behind it too, while the kernel ahead still runs;
since all of them wait for that one to end, the order of writes and reads stays that of the launches
(docs/notes/decode_stages.md).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tiercel.env import has_dependent_launch

ALIGNMENT = 16  # bytes, of a vector load
DEPENDENT_CAPABILITY = (9, 0)


@triton.jit
def wait_for_inputs(IS_DEPENDENT: tl.constexpr):
    """Let the next kernel start and wait for the end of the one ahead; first in every kernel."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@functools.cache
def is_dependent(device: torch.device) -> bool:
    """Whether kernels on a device may start before the one ahead ends; read once a process."""
    if device.type != "cuda" or not has_dependent_launch():
        return False
    return torch.cuda.get_device_capability(device) >= DEPENDENT_CAPABILITY


class _Pointer:
    """What Triton asks of a tensor to compile for it."""

    def __init__(self, dtype: torch.dtype, *, is_aligned: bool) -> None:
        self.dtype = dtype
        self._address = 0 if is_aligned else 1

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        return 0


@functools.cache
def _compiled(
    kernel: Any,
    kinds: tuple[tuple[torch.dtype, bool] | None, ...],
    numbers: tuple[type, ...],
    constants: tuple[tuple[str, object], ...],
    num_warps: int,
    *,
    is_dependent: bool,
    device: int,
) -> Any:
    """The kernel for tensors of such kinds, loaded on a device."""
    pointers = [None if kind is None else _Pointer(kind[0], is_aligned=kind[1]) for kind in kinds]
    values = [number() for number in numbers]
    launch_pdl = {"launch_pdl": True} if is_dependent else {}
    with torch.cuda.device(device):
        return kernel.warmup(
            *pointers, *values, grid=(1,), num_warps=num_warps, **dict(constants), **launch_pdl
        )


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int | float],
    constants: Mapping[str, object],
    *,
    num_warps: int,
) -> None:
    """Enqueue on the current stream of the tensors' device, which is the current one.

    Args:
        kernel: of `triton.jit`: tensors, numbers that are not specialised, constants and the
            constant IS_DEPENDENT, which goes to `wait_for_inputs`.
        grid: programs, all > 0.
        tensors: its pointers in order, the first not None.
        numbers: its scalars in order; integers below 2**31.
        constants: the others but IS_DEPENDENT, by name in the kernel's order.
        num_warps: of a program.
    """
    first = tensors[0]
    assert first is not None, "a kernel writes somewhere"
    dependent = is_dependent(first.device)
    if not isinstance(kernel, triton.JITFunction):  # the interpreter
        kernel[grid](*tensors, *numbers, **constants, IS_DEPENDENT=False)
        return
    addresses: list[int | None] = []
    kinds: list[tuple[torch.dtype, bool] | None] = []
    for tensor in tensors:
        if tensor is None:
            addresses.append(None)
            kinds.append(None)
        else:
            address = tensor.data_ptr()
            addresses.append(address)
            kinds.append((tensor.dtype, address % ALIGNMENT == 0))
    pairs = (*constants.items(), ("IS_DEPENDENT", dependent))
    compiled = _compiled(
        kernel,
        tuple(kinds),
        tuple(map(type, numbers)),
        pairs,
        num_warps,
        is_dependent=dependent,
        device=first.device.index,
    )
    compiled[grid](*addresses, *numbers, *constants.values(), dependent)
