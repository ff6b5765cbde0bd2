"""Whether devices run the fused kernels, and whether they share memory for sums over GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tiercel.kernels.collectives.symmetric_memory import SymmetricMemory, make_symmetric_memory
from tiercel.kernels.fused.fused_refusal import Refusal, refuse_gpu
from tiercel.kernels.runtime import rtc


def refuse_device(device: torch.device) -> Refusal | None:
    """Why a device does not run the fused kernels; None if it does."""
    if device.type != "cuda":
        return Refusal(f"the device is {device.type}, not a GPU")
    return refuse_gpu(
        torch.cuda.get_device_capability(device),
        torch.cuda.get_device_properties(device).multi_processor_count,
        rtc.max_smem_bytes(device),
    )


def share_memory(
    num_bytes: int, group: dist.ProcessGroup, device: torch.device, refusal: Refusal | None
) -> SymmetricMemory | Refusal:
    """Memory in which ranks exchange sums; all of them call it, also those that want none.

    Args:
        num_bytes: of each rank, equal on all.
        group: of the ranks, which gathers tensors of `device`.
        device: this rank's GPU.
        refusal: why this rank's layers do not fit the kernel.

    Returns:
        The memory, or why there is none, the same on all ranks.
    """
    made = make_symmetric_memory(num_bytes, group, device, refusal.reason if refusal else "")
    return Refusal(made) if isinstance(made, str) else made
