"""Launches Triton kernels at the cost of the launch alone, dependent on the one ahead where it may.

Triton's own call binds, specialises and hashes every argument each time: 9 us of the host, and a
prompt's step makes hundreds of them. Here a kernel takes tensors, then numbers, then constants; the
types of the tensors, their alignment and the constants are the key of a compiled kernel, so a
launch after the first is a look-up. So numbers are never specialised (`do_not_specialize`): sizes
that a model fixes are constants.

Dependent launch: every kernel launched here calls `wait_for_inputs` before it touches memory other
than weights. Its CTAs may then be resident, and those of later kernels too, while the kernel ahead
still runs. Since all of them wait for that one to end, the order of writes and reads stays that of
the launches (docs/notes/decode_stages.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tiercel.kernels.runtime import rtc

ALIGNMENT = 16  # bytes, of a vector load


@triton.jit
def wait_for_inputs(IS_DEPENDENT: tl.constexpr):
    """Let the next kernel start and wait for the one ahead; only weights are read before it."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


def dependent_options(device: torch.device) -> dict[str, bool]:
    """Options of Triton's own call of a kernel with IS_DEPENDENT, besides its arguments."""
    dependent = rtc.is_dependent(device)
    return {"IS_DEPENDENT": dependent} | ({"launch_pdl": True} if dependent else {})


class _Pointer:
    """Stands for a tensor where Triton compiles a kernel."""

    def __init__(self, dtype: torch.dtype, *, is_aligned: bool) -> None:
        self.dtype = dtype
        self._address = 0 if is_aligned else 1

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        return 0


class TritonLaunch:
    """A kernel with its constants and warps; compiled for types of tensors as they come."""

    def __init__(self, kernel: Any, num_warps: int, constants: Mapping[str, object]) -> None:
        """Compile nothing yet.

        Args:
            kernel: of `triton.jit`: tensors, numbers that are not specialised, constants and the
                constant IS_DEPENDENT, which goes to `wait_for_inputs`.
            num_warps: of a program.
            constants: by name, in the kernel's order, without IS_DEPENDENT.
        """
        self._kernel = kernel
        self._num_warps = num_warps
        self._constants = dict(constants)
        self._values = tuple(constants.values())
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor | None],
        numbers: Sequence[int | float] = (),
    ) -> None:
        """Enqueue on the current stream of the tensors' device, which is the current one.

        Args:
            grid: programs, all > 0.
            tensors: the kernel's pointers in order, the first not None.
            numbers: its scalars in order, always of the same types; integers below 2**31.
        """
        first = tensors[0]
        assert first is not None, "a kernel writes somewhere"
        if not first.is_cuda:  # the interpreter
            self._kernel[grid](*tensors, *numbers, **self._constants, IS_DEPENDENT=False)
            return
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        # For each pointer, as Triton does: one that is read as a scalar must not change how others
        # are spread over lanes, and so the order of sums.
        are_aligned = [not address or address % ALIGNMENT == 0 for address in addresses]
        device = first.get_device()
        key = (device, *dtypes, *are_aligned)
        found = self._compiled.get(key)
        if found is None:
            found = self._compiled[key] = self._compile(dtypes, are_aligned, numbers, first.device)
        kernel, dependent = found
        kernel[grid](
            *addresses,
            *numbers,
            *self._values,
            dependent,
            stream=torch._C._cuda_getCurrentRawStream(device),
        )

    def _compile(
        self,
        dtypes: Sequence[torch.dtype | None],
        are_aligned: Sequence[bool],
        numbers: Sequence[int | float],
        device: torch.device,
    ) -> tuple[Any, bool]:
        """The kernel, loaded on a device, and whether its launches are dependent."""
        dependent = rtc.is_dependent(device)
        pointers = [
            None if dtype is None else _Pointer(dtype, is_aligned=is_aligned)
            for dtype, is_aligned in zip(dtypes, are_aligned, strict=True)
        ]
        options = {"num_warps": self._num_warps} | ({"launch_pdl": True} if dependent else {})
        with torch.cuda.device(device):
            kernel = self._kernel.warmup(
                *pointers,
                *numbers,
                grid=(1,),
                **self._constants,
                IS_DEPENDENT=dependent,
                **options,
            )
        return kernel, dependent
