"""Whether a device runs the fused kernels."""

from __future__ import annotations

import torch

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
