"""Sum or gather of small tensors of the GPUs of one host, by a kernel of ours instead of NCCL."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tiercel import env
from tiercel.errors import ArgumentError, InternalError
from tiercel.kernels.collectives.all_reduce import (
    CAPABILITY,
    CHANNELS,
    DTYPES,
    GATHER,
    MAX_BYTES,
    MOST_RANKS,
    exchange_bytes,
    launch_all_reduce,
    launch_all_reduce_norm,
    load_all_reduce,
    norm_warps,
)
from tiercel.kernels.collectives.symmetric_memory import SymmetricMemory, make_symmetric_memory

_ALIGNMENT = 16  # bytes, of a thread's loads


class SmallAllReduce:
    """All-reduce and all-gather of up to `max_bytes` of a rank; from `make_small_all_reduce`.

    Calls may be captured into CUDA graphs. All ranks make the same calls and replays, with tensors
    of the same sizes, in the same order and on one stream.

    Attributes:
        max_bytes: of a tensor; larger ones are for NCCL.
    """

    def __init__(self, memory: SymmetricMemory, device: torch.device) -> None:
        self.max_bytes = MAX_BYTES
        self._memory = memory
        self._epochs = torch.zeros(CHANNELS, dtype=torch.int32, device=device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum a tensor over the ranks, with the same bits on each.

        Args:
            x: float16, bfloat16 or float32 of any shape, of at most `max_bytes`, on this rank's
                GPU. One that is not contiguous or begins at an odd address is copied: ranks need
                not agree on that.

        Returns:
            The shape and dtype of x, contiguous: parts added in float32 in the order of ranks,
            rounded once.

        Raises:
            ArgumentError: the dtype, size or device is another one.
        """
        if x.dtype not in DTYPES:
            raise ArgumentError(
                f"all_reduce: x is {x.dtype}.", hint="Pass float16, bfloat16 or float32."
            )
        self._check(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            launch_all_reduce(_aligned(x), out, self._memory, self._epochs)
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """The parts of all ranks, in their order.

        Args:
            x: of any dtype and shape, of an even number of bytes, at most `max_bytes`; else as in
                `all_reduce`.

        Returns:
            (ranks, *shape of x) in the dtype of x, contiguous.

        Raises:
            ArgumentError: the size or device is another one.
        """
        if x.nbytes % 2:
            raise ArgumentError(f"all_gather: x has {x.nbytes} bytes.", hint="Pass an even number.")
        self._check(x)
        size = len(self._memory.addresses), *x.shape
        out = torch.empty(size, dtype=x.dtype, device=x.device)
        if x.numel():
            parts = _aligned(x).view(-1).view(GATHER), out.view(-1).view(GATHER)
            launch_all_reduce(*parts, self._memory, self._epochs)
        return out

    def norms(self, x: Tensor) -> bool:
        """Whether `add_norm` takes a tensor: its size, width and dtype."""
        has_size = x.dim() == 2 and 0 < x.nbytes <= self.max_bytes
        return has_size and norm_warps(x.shape[1], x.dtype, len(self._memory.addresses)) > 0

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of a residual to which the sum of x over ranks is added first.

        Args:
            x: (rows, hidden), which `norms` takes; else as in `all_reduce`.
            residual: (rows, hidden) float32, contiguous; mutated.
            weight: (hidden,) float32.
            eps: added to the mean square, > 0.

        Returns:
            (rows, hidden) in the dtype of x. Parts are added in float32 in the order of ranks, and
            nothing is rounded but the result.

        Raises:
            ArgumentError: the shapes, the residual's dtype or the device are others.
        """
        self._check(x)
        is_right = self.norms(x) and residual.shape == x.shape and weight.shape == x.shape[1:]
        is_right = is_right and residual.dtype == weight.dtype == torch.float32
        if not is_right or not residual.is_contiguous():
            raise ArgumentError(
                f"add_norm: x is {tuple(x.shape)} {x.dtype}, the residual {tuple(residual.shape)} "
                f"{residual.dtype}.",
                hint="Pass 16-bit rows of a multiple of 256 columns, and float32 ones of the same.",
            )
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        launch_all_reduce_norm(_aligned(x), residual, weight, out, eps, self._memory, self._epochs)
        return out

    def _check(self, x: Tensor) -> None:
        if x.nbytes > self.max_bytes:
            raise ArgumentError(
                f"all_reduce: x has {x.nbytes} bytes.", hint=f"Pass at most {self.max_bytes}."
            )
        if x.device != self._epochs.device:
            raise ArgumentError(
                f"all_reduce: x is on {x.device}.", hint=f"Pass one on {self._epochs.device}."
            )


def _aligned(x: Tensor) -> Tensor:
    """A tensor as a kernel reads it."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


def make_small_all_reduce(group: dist.ProcessGroup, device: torch.device) -> SmallAllReduce | str:
    """Share memory among the GPUs of a group and load the kernels; all ranks call it.

    Args:
        group: NCCL's, or another one that gathers tensors of `device`.
        device: this rank's GPU, with its index; or the CPU.

    Returns:
        The all-reduce, or why there is none, the same reason on all ranks: NCCL or gloo serves.
    """
    if device.type != "cuda":
        return f"the device is {device.type}, not a GPU"
    ranks = group.size()
    refusal = refuse_small_all_reduce(ranks, torch.cuda.get_device_capability(device))
    if not refusal:
        try:
            load_all_reduce(ranks, device)
        except InternalError as error:
            refusal = str(error).splitlines()[0]
    made = make_symmetric_memory(exchange_bytes(ranks), group, device, refusal)
    return made if isinstance(made, str) else SmallAllReduce(made, device)


def refuse_small_all_reduce(ranks: int, capability: tuple[int, int]) -> str:
    """Why a rank does not use the kernel; "" if it does."""
    reasons = (
        (not env.has_small_all_reduce(), "TIERCEL_SMALL_ALL_REDUCE=0"),
        (ranks < 2, "there is one rank"),
        (ranks > MOST_RANKS, f"more than {MOST_RANKS} ranks"),
        (capability < CAPABILITY, "the GPU is older than Ampere"),
    )
    return next((reason for is_so, reason in reasons if is_so), "")
