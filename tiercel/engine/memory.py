"""How much memory there is, and what does not fit into it."""

from __future__ import annotations

from pathlib import Path

import torch

from tiercel.errors import OutOfMemoryError

# Of the memory that is free on a CPU when the model starts. The rest is for activations and other
# programs.
CPU_SHARE = 0.8
GIB = 2**30


def available_bytes(device: torch.device, utilization: float) -> int:
    """Bytes that weights and cache may take now.

    Args:
        device: where.
        utilization: share of a GPU's whole memory that may be used; ignored on a CPU.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - utilization) * total)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(int(line.split()[1]) * 1024 * CPU_SHARE)
    raise OutOfMemoryError("the system does not tell how much memory is available.")


def check_weights_fit(needed_bytes: int, device: torch.device, utilization: float) -> None:
    """Refuse a model whose weights alone do not fit.

    Raises:
        OutOfMemoryError: with both figures.
    """
    available = available_bytes(device, utilization)
    if needed_bytes > available:
        raise OutOfMemoryError(
            f"the weights need about {needed_bytes / GIB:.1f} GiB but {device} has "
            f"{available / GIB:.1f} GiB to use.",
            hint="Use a smaller model or a smaller quantisation.",
        )


def cache_blocks(
    *, bytes_per_block: int, block_size: int, max_model_len: int, max_num_seqs: int, available: int
) -> int:
    """How many blocks the cache gets, the null block included.

    Enough for every row at full length, or what memory allows.

    Raises:
        OutOfMemoryError: not one sequence of `max_model_len` fits; names the length that would.
    """
    per_sequence = -(-max_model_len // block_size)
    affordable = available // bytes_per_block - 1
    if affordable < per_sequence:
        fits = max(0, affordable) * block_size
        raise OutOfMemoryError(
            f"the cache of one sequence of {max_model_len} tokens needs "
            f"{per_sequence * bytes_per_block / GIB:.2f} GiB but "
            f"{max(0, available) / GIB:.2f} GiB are left.",
            hint=f"Lower max_model_len to {fits} or less." if fits else "Use a smaller model.",
        )
    return 1 + min(affordable, per_sequence * max_num_seqs)
