"""From one attention to the next in one launch, for up to 16 tokens (cuda/decode_chain.cu).

The output projection, gate and up, down and the next layer's q, k, v, with residual, norms and
SwiGLU between them. 128 CTAs in clusters of two hold a whole SM each and hand activations to each
other through memory. They must run side by side, so the launch is cooperative; it may be dependent
too (the driver takes both). Should a CTA come late all the same, the others stop waiting after
seconds and the result is NaN, never a hang.

Floor: the planes of four matrices once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiercel.kernels import rtc
from tiercel.kernels.q4k_matvec import KernelPlanes

CTAS, THREADS = 128, 640
HIDDEN, HEADS_WIDTH, QK_ROWS = 4096, 6144, 5120
MAX_TOKENS = 16
CAPABILITY = (9, 0)
SMEM_BYTES = 227 << 10  # the most that one CTA can have
COLUMNS = 16  # of 256 in a slice
_COLUMN_BYTES = 4352  # of 8 tokens
_UNIT_BYTES = {False: 2304, True: 3360}  # of a ring's place, where a matrix is Q6_K
_WARPS = 16  # that multiply
# (tiles of 8 tokens, whether a matrix is Q6_K) -> units of a warp in flight, unit columns of x,
# buffers of sums. Others that fit are within 3% (H200, docs/notes/decode_chain.md).
_RINGS = {
    (1, False): (3, 20, 2),
    (1, True): (2, 24, 2),
    (2, False): (2, 12, 1),
    (2, True): (2, 12, 1),
}
_HEADERS = (
    *("q4k_ptx", "chain_ptx", "exchange_ptx", "q4k_tokens"),
    *("chain_four", "q4k_units", "chain_six", "q4k_units"),
    *("chain_products", "chain_exchange"),
)


@dataclass(frozen=True, slots=True)
class ChainTypes:
    """Which matrices of a launch are Q6_K, the others being Q4_K; `qk`, `v`: of the next layer."""

    o: bool
    gate_up: bool
    down: bool
    qk: bool = False
    v: bool = False

    @property
    def any_six(self) -> bool:
        """Whether a place of a ring holds a unit of Q6_K."""
        return any((self.o, self.gate_up, self.down, self.qk, self.v))


def exchange_bytes(slices: int) -> int:
    """Of the buffer that activations travel through."""
    return (slices + 2) * COLUMNS * _COLUMN_BYTES * 2


def smem_bytes(tokens: int, types: ChainTypes) -> int:
    """Shared memory of a CTA: `Layout` of cuda/chain_products.cuh.

    Not all that there is: each CTA takes 1 KiB of an SM besides, so that behind one of 227 KiB none
    of the next kernel's can wait, not even without shared memory. With what is left the rotation's
    do (23 us of 2,743, 16 requests, H200, results/step_variants_h200.json).
    """
    tiles = -(-tokens // 8)
    stages, x_slots, buffers = _RINGS[tiles, types.any_six]
    columns, ring = x_slots * tiles * _COLUMN_BYTES, _WARPS * stages * _UNIT_BYTES[types.any_six]
    sums, scratch = buffers * 16 * tiles * 512, 8 * tiles * 144
    barriers = 8 * (2 * x_slots + buffers * (tiles + 2))
    return columns + ring + sums + scratch + barriers + 8


@functools.cache
def cuda_source(tokens: int, slices: int, types: ChainTypes, *, is_last: bool) -> rtc.KernelSource:
    """The kernel for a number of tokens; `slices` of 4096 columns in a row of down."""
    tiles = -(-tokens // 8)
    stages, x_slots, buffers = _RINGS[tiles, types.any_six]
    macros = (
        ("TOKENS", 8 * tiles),
        ("SLICES", slices),
        ("IS_LAST", int(is_last)),
        ("SIX_O", int(types.o)),
        ("SIX_GU", int(types.gate_up)),
        ("SIX_DOWN", int(types.down)),
        ("SIX_QK", int(types.qk)),
        ("SIX_V", int(types.v)),
        ("ANY_SIX", int(types.any_six)),
        ("STAGES", stages),
        ("XSLOTS", x_slots),
        ("BUFFERS", buffers),
        ("MEANS", 32),
        ("IN_FILE", 0),
    )
    return rtc.KernelSource("decode_chain", macros, _HEADERS)


def can_run(device: torch.device) -> bool:
    """Whether a device has the SMs, the shared memory and the instructions."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return False
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return num_sms >= CTAS and rtc.max_smem_bytes(device) >= SMEM_BYTES


class _Args(ctypes.Structure):
    """Args of the source."""

    _fields_ = (
        ("planes", KernelPlanes * 5),
        *((name, ctypes.c_void_p) for name in ("attended", "x", "heads", "mlp_norm", "next_norm")),
        *((name, ctypes.c_void_p) for name in ("exchange", "squares", "launches", "counters")),
        ("m", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


def load_decode_chain(
    slices: int, types: ChainTypes, device: torch.device, *, is_last: bool
) -> None:
    """Compile and load what `launch_decode_chain` launches."""
    sources = {
        cuda_source(tokens, slices, types, is_last=is_last): smem_bytes(tokens, types)
        for tokens in (8, 16)
    }
    rtc.fill_cache(list(sources), rtc.device_arch(device))
    for source, smem in sources.items():
        rtc.load_kernel(source, device, smem)


def make_args(
    attended: Tensor,
    x: Tensor,
    heads: Tensor | None,
    planes: Sequence[Sequence[Tensor]],
    mlp_norm: Tensor,
    next_norm: Tensor,
    exchange: Tensor,
    squares: Tensor,
    launches: Tensor,
    counters: Tensor,
    eps: float,
) -> Any:
    """Args of the source. It holds addresses alone: the tensors must outlive the launch.

    Args:
        attended: (tokens, HIDDEN) float16, outputs of the attention.
        x: (tokens, HIDDEN) float32, the residual, updated in place.
        heads: (tokens, HEADS_WIDTH) float16, q, k, v of the next layer; None behind the last.
        planes: of o, gate and up, down, q and k (and v, if of the same type), v.
        mlp_norm: (HIDDEN,) float32.
        next_norm: (HIDDEN,) float32, of the next layer's attention.
        exchange: (`exchange_bytes`,) uint8.
        squares: (2, CTAS, 2, 8) int32, zeros before the first launch.
        launches: (2, CTAS) int32, as the next zeros before the first launch.
        counters: (slices + 2, COLUMNS, 2) int32, for layers of so many slices alone.
        eps: of the norms.
    """
    return _Args(
        (KernelPlanes * len(planes))(*map(KernelPlanes.of, planes)),
        attended.data_ptr(),
        x.data_ptr(),
        None if heads is None else heads.data_ptr(),
        *(tensor.data_ptr() for tensor in (mlp_norm, next_norm, exchange, squares)),
        *(tensor.data_ptr() for tensor in (launches, counters)),
        x.shape[0],
        eps,
    )


def launch_decode_chain(
    args: Any,
    tokens: int,
    slices: int,
    types: ChainTypes,
    device: torch.device,
    *,
    is_last: bool,
    is_dependent: bool,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        args: from `make_args`.
        tokens: rows of x.
        slices: of 4096 columns in a row of down.
        types: of the matrices.
        device: of all tensors.
        is_last: whether there are no next q, k, v.
        is_dependent: see `rtc.launch`.
    """
    source = cuda_source(tokens, slices, types, is_last=is_last)
    kernel = rtc.load_kernel(source, device, smem_bytes(tokens, types))
    rtc.launch(kernel, CTAS, THREADS, [args], is_dependent=is_dependent, is_cooperative=True)
