"""Sum of a small tensor over the GPUs of one host in one launch (cuda/collectives/all_reduce.cu).

Each rank stores its part into the memory of all others and adds what arrives in its own, in the
order of ranks: the same bits on every rank. Data and their epoch are words of 8 bytes, so twice the
bytes travel, and in return there is one latency of a store and no fence, flag or barrier. A gather
is the same with parts written one after the other. With a norm the sum is added to a residual,
which is normed in the same launch: a CTA has a row. It saves a launch and a trip through the L2.

Floor: a launch, a store to another GPU, and (ranks - 1) * 2 * bytes over the links of a GPU.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from tiercel.kernels.collectives.symmetric_memory import SymmetricMemory
from tiercel.kernels.runtime import rtc

MAX_BYTES = 1 << 20  # more is a matter of bandwidth, and NCCL's
MOST_RANKS = 8
CAPABILITY = (8, 0)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GATHER = torch.uint8  # in place of a dtype: parts are bytes, and are not added
_CHANNEL_BYTES = 512  # of a tensor, of a warp: 16 a lane
CHANNELS = MAX_BYTES // _CHANNEL_BYTES
NORM_DTYPES = (torch.float16, torch.bfloat16)
_MANY_RANKS, _NORM_WARPS = 4, (32, 16)  # of a row, up to so many ranks and above: registers
WARPS = 4  # of a CTA; not measured yet


def exchange_bytes(ranks: int) -> int:
    """Shared memory of a rank: two buffers of every rank's words."""
    return 2 * ranks * 2 * MAX_BYTES


@functools.cache
def all_reduce_source(
    ranks: int, dtype: torch.dtype, warps: int = WARPS, *, has_norm: bool = False
) -> rtc.KernelSource:
    """The kernel for a number of ranks; dtype: of `DTYPES`, or `GATHER`."""
    macros = (
        ("RANKS", ranks),
        ("WARPS", warps),
        ("CHANNELS", CHANNELS),
        ("IS_FLOAT", int(dtype == torch.float32)),
        ("IS_BF16", int(dtype == torch.bfloat16)),
        ("IS_GATHER", int(dtype == GATHER)),
        ("HAS_NORM", int(has_norm)),
    )
    return rtc.KernelSource("all_reduce", macros)


@functools.cache
def arguments_type(ranks: int, *, has_norm: bool = False) -> type[ctypes.Structure]:
    """Args of the source."""
    fields = (
        *((name, ctypes.c_void_p) for name in ("x", "out", "epochs")),
        ("memory", ctypes.c_void_p * ranks),
        ("num_bytes", ctypes.c_int),
        ("rank", ctypes.c_int),
    )
    norm = (
        ("residual", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )
    return type("Args", (ctypes.Structure,), {"_fields_": fields + (norm if has_norm else ())})


def num_ctas(num_bytes: int, warps: int = WARPS) -> int:
    """CTAs of a launch."""
    return -(-num_bytes // (_CHANNEL_BYTES * warps))


def norm_warps(hidden: int, dtype: torch.dtype, ranks: int) -> int:
    """Warps of a CTA that sums and norms a row; 0 if none does."""
    warps, rest = divmod(hidden, _CHANNEL_BYTES // 2)
    most = _NORM_WARPS[ranks > _MANY_RANKS]
    return 0 if rest or warps > most or dtype not in NORM_DTYPES else warps


def load_all_reduce(ranks: int, device: torch.device) -> None:
    """Compile and load what `launch_all_reduce` launches."""
    sources = [all_reduce_source(ranks, dtype) for dtype in (*DTYPES, GATHER)]
    rtc.fill_cache(sources, rtc.device_arch(device))
    for source in sources:
        rtc.load_kernel(source, device)


def launch_all_reduce(
    x: Tensor, out: Tensor, memory: SymmetricMemory, epochs: Tensor, warps: int = WARPS
) -> None:
    """Enqueue on the current stream; all ranks launch the same sizes in the same order.

    Args:
        x: contiguous, of 1 to MAX_BYTES bytes, an even number, at a multiple of 16; bytes for a
            gather.
        out: like x; of a gather (ranks, bytes).
        memory: `exchange_bytes` of every rank, zero before the first launch.
        epochs: (CHANNELS,) int32, zero before the first launch; mutated.
        warps: of a CTA.
    """
    ranks = len(memory.addresses)
    arguments = arguments_type(ranks)(
        x.data_ptr(),
        out.data_ptr(),
        epochs.data_ptr(),
        (ctypes.c_void_p * ranks)(*memory.addresses),
        x.nbytes,
        memory.rank,
    )
    rtc.launch(
        rtc.load_kernel(all_reduce_source(ranks, x.dtype, warps), x.device),
        num_ctas(x.nbytes, warps),
        32 * warps,
        [arguments],
        is_dependent=rtc.is_dependent(x.device),
    )


def launch_all_reduce_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: float,
    memory: SymmetricMemory,
    epochs: Tensor,
) -> None:
    """Enqueue: residual += the sum of x over ranks, out = its norm; see `launch_all_reduce`.

    Args:
        x: (rows, hidden) of `NORM_DTYPES`, with `norm_warps`, as in `launch_all_reduce`.
        residual: (rows, hidden) float32, contiguous; mutated.
        weight: (hidden,) float32.
        out: like x.
        eps: added to the mean square.
        memory: as in `launch_all_reduce`, and the same.
        epochs: likewise.
    """
    ranks = len(memory.addresses)
    warps = norm_warps(x.shape[1], x.dtype, ranks)
    arguments = arguments_type(ranks, has_norm=True)(
        x.data_ptr(),
        out.data_ptr(),
        epochs.data_ptr(),
        (ctypes.c_void_p * ranks)(*memory.addresses),
        x.nbytes,
        memory.rank,
        residual.data_ptr(),
        weight.data_ptr(),
        eps,
    )
    source = all_reduce_source(ranks, x.dtype, warps, has_norm=True)
    rtc.launch(
        rtc.load_kernel(source, x.device),
        x.shape[0],
        32 * warps,
        [arguments],
        is_dependent=rtc.is_dependent(x.device),
    )
