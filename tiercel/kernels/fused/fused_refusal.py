"""Why a fused kernel does not run a model or a device, as data that a person can read.

Free of PyTorch, as the geometry files of the kernels are: `tiercel inspect` uses them everywhere.
"""

from __future__ import annotations

from msgspec import Struct

CAPABILITY = (9, 0)
CTAS = 128  # that must run side by side, one an SM
SMEM_BYTES = 227 << 10  # all that a CTA can have
MOST_RANKS = 8  # GPUs of a host that exchange sums within a kernel


class Refusal(Struct, frozen=True):
    """A reason, without the kernel's name and without a full stop."""

    reason: str


def refuse_gpu(capability: tuple[int, int], num_sms: int, smem_bytes: int) -> Refusal | None:
    """Why a GPU does not run the fused kernels; None if it does. Pure: readable by a test.

    Args:
        capability: of the GPU, (major, minor).
        num_sms: its SMs.
        smem_bytes: shared memory that a CTA can have.
    """
    if capability != CAPABILITY:
        found, needed = (".".join(map(str, pair)) for pair in (capability, CAPABILITY))
        return Refusal(f"the GPU has compute capability {found}, not {needed} (Hopper)")
    if num_sms < CTAS:
        return Refusal(f"the GPU has {num_sms} SMs, fewer than {CTAS}")
    if smem_bytes < SMEM_BYTES:
        return Refusal(f"a CTA can have {smem_bytes} bytes of shared memory, not {SMEM_BYTES}")
    return None


def refuse_ranks(ranks: int) -> Refusal | None:
    """Why so many GPUs cannot exchange sums in a kernel; None if they can."""
    if ranks <= MOST_RANKS:
        return None
    return Refusal(f"{ranks} GPUs share the model, more than {MOST_RANKS}")


def refuse_sharing(ranks: int, *, has_memory: bool) -> Refusal | None:
    """Why ranks do not add sums within a kernel; None if they do, or if there is one. Pure.

    Args:
        ranks: GPUs that share the model.
        has_memory: whether each reads and writes the others' memory.
    """
    if ranks > 1 and not has_memory:
        return refuse_ranks(ranks) or Refusal(f"{ranks} GPUs share the model and no memory")
    return refuse_ranks(ranks)
