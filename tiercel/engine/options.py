"""Options of a model, each checked and resolved against this machine."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from tiercel import env
from tiercel.config import MAX_RANKS, LoadOptions
from tiercel.errors import ArgumentError
from tiercel.params import shown
from tiercel.resting import uses_native

# Capabilities of PyTorch with fast 4-bit planes and dense rows in bfloat16. Without (the "default"
# build of PyTorch's kernels on x86) a row through planes takes 36 ms where float32 takes 2.9 (4096
# x 4096, docs/notes/cpu_decode.md); other processors were not measured.
BFLOAT16_CAPABILITIES = ("AVX2", "AVX512")
MAX_THREADS = 1024
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def resolve_count(name: str, value: object, default: int, high: int, low: int = 1) -> int:
    """A whole number within bounds; None means `default`.

    Raises:
        ArgumentError: anything else, naming the option.
    """
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ArgumentError(f"{name}={shown(value)} is out of range.", hint=f"Use {low} to {high}.")
    return value


def resolve_share(value: object) -> float:
    """A share of the GPU's memory, above 0 and up to 1.

    Raises:
        ArgumentError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        raise ArgumentError(
            f"gpu_memory_utilization={shown(value)} is out of range.", hint="Use 0 < x <= 1."
        )
    return value


def resolve_device(name: str | torch.device) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:i` means on this machine.

    Raises:
        ArgumentError: another text, or there is no such GPU.
    """
    name = str(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not _DEVICE.fullmatch(name):
        raise ArgumentError(
            f"device={name!r} is unknown.", hint="Use auto, cpu, cuda or cuda:INDEX."
        )
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ArgumentError(
            f"device={name!r}: no usable NVIDIA GPU was found.",
            hint="Use --device cpu; `tiercel doctor` shows what is missing.",
        )
    index = int(name[5:] or 0)
    if index >= torch.cuda.device_count():
        raise ArgumentError(
            f"device={name!r}: this machine has {torch.cuda.device_count()} GPU(s).",
            hint=f"Use cuda:0 to cuda:{torch.cuda.device_count() - 1}.",
        )
    return torch.device("cuda", index)


def resolve_ranks(value: object, device: torch.device, per_host: int = 0) -> int:
    """The number of ranks, each of which has a GPU of its own.

    Args:
        value: as given.
        device: resolved.
        per_host: ranks on each host; 0: all of them.

    Raises:
        ArgumentError: not a power of two, more than there are GPUs, or together with a device that
            is one alone.
    """
    count = resolve_count("tensor_parallel_size", value, 1, MAX_RANKS)
    if count == 1:
        return 1
    if count & (count - 1):
        raise ArgumentError(
            f"tensor_parallel_size={count} is not a power of two.", hint="Use 1, 2, 4 or 8."
        )
    if device.type == "cpu":
        if not env.has_cpu_ranks():
            raise ArgumentError(
                f"tensor_parallel_size={count} needs {count} GPUs, but the device is the CPU.",
                hint="Leave it out: one process uses all cores.",
            )
        return count
    if device.index:
        raise ArgumentError(
            f"tensor_parallel_size={count} begins at the first GPU, but the device is {device}.",
            hint="Use --device cuda, and CUDA_VISIBLE_DEVICES to choose GPUs.",
        )
    num_gpus = torch.cuda.device_count()
    if (per_host or count) > num_gpus:
        raise ArgumentError(
            f"tensor_parallel_size={count}: this machine has {num_gpus} GPU(s).",
            hint=f"Use up to {1 << (num_gpus.bit_length() - 1)}.",
        )
    return count


def resolve_own_device(
    options: LoadOptions, device: torch.device, num_ranks: int, rank: int
) -> torch.device:
    """The device of a rank; replicas have the GPUs of a machine in turn.

    Args:
        options: with the engine's number among those of this machine.
        device: resolved.
        num_ranks: GPUs of each engine.
        rank: of this process.

    Raises:
        ArgumentError: there are not as many GPUs as all engines need, or a device that is one
            alone.
    """
    count = options.num_replicas
    if device.type == "cpu":
        return device
    rank %= options.ranks_per_host or num_ranks
    if count == 1:
        return torch.device("cuda", (device.index or 0) + rank)
    if device.index:
        raise ArgumentError(
            f"--replicas {count} begins at the first GPU, but the device is {device}.",
            hint="Use --device cuda, and CUDA_VISIBLE_DEVICES to choose GPUs.",
        )
    num_gpus = torch.cuda.device_count()
    if count * num_ranks > num_gpus:
        each = "a GPU" if num_ranks == 1 else f"{num_ranks} GPUs"
        raise ArgumentError(
            f"--replicas {count} with {each} each needs {count * num_ranks} GPUs: this machine has "
            f"{num_gpus}.",
            hint=f"Use up to {num_gpus // num_ranks}.",
        )
    return torch.device("cuda", options.replica * num_ranks + rank)


def resolve_dtype(
    name: str, device: torch.device, file_format: str, fits: Callable[[str], bool]
) -> torch.dtype:
    """The dtype of products and cache.

    ``auto`` on a GPU, and on a CPU with the native library: float16 for GGUF files (their weights
    are in its range and it keeps 3 more bits), bfloat16 for Hugging Face folders. On a CPU without:
    the fastest that fits its memory. That is bfloat16 with AVX2 or AVX-512, where quantised weights
    stay packed; on other processors float32, and bfloat16 where float32 does not fit.

    Args:
        name: what was requested.
        device: where.
        file_format: ``gguf`` or ``hf``.
        fits: whether weights and the cache of one sequence fit the memory in a dtype.

    Raises:
        ArgumentError: an unknown name, or float16 on a CPU without the native library, where
            there are no fast products for it.
    """
    if name == "auto":
        if device.type == "cuda" or uses_native(device.type):
            return torch.float16 if file_format == "gguf" else torch.bfloat16
        capability = torch.backends.cpu.get_cpu_capability()
        is_float32 = capability not in BFLOAT16_CAPABILITIES and fits("float32")
        return torch.float32 if is_float32 else torch.bfloat16
    if name not in DTYPES:
        raise ArgumentError(
            f"dtype={name!r} is unknown.", hint=f"Use auto or one of {', '.join(DTYPES)}."
        )
    if name == "float16" and not _has_float16(device):
        raise ArgumentError(
            "dtype='float16' does not run on a CPU without the native library.",
            hint="Use bfloat16 or float32; `tiercel doctor` says why there is no library.",
        )
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as options spell it."""
    return str(dtype).removeprefix("torch.")


def dtypes_from(dtype: torch.dtype, device: torch.device) -> list[str]:
    """A dtype, followed by all other dtypes of a device."""
    others = [
        name
        for name, other in DTYPES.items()
        if other != dtype and (name != "float16" or _has_float16(device))
    ]
    return [dtype_name(dtype), *others]


def _has_float16(device: torch.device) -> bool:
    return device.type == "cuda" or uses_native(device.type)


def resolve_threads(value: object, usable_cpus: int) -> int:
    """Threads of products on a CPU; None means PyTorch's own number, within what may be used.

    PyTorch counts cores and knows of no quota: threads beyond it wait for each other in turn.

    Raises:
        ArgumentError: no whole number, or one out of range.
    """
    default = min(torch.get_num_threads(), usable_cpus)
    return resolve_count("threads", value, default, MAX_THREADS)
