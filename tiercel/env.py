"""The only reader of the environment: the meaning and the allowed values of each variable."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import platformdirs

from tiercel.errors import ArgumentError

_BOOLEANS = {"0": False, "1": True}
_SWITCHES = tuple(
    f"TIERCEL_{name}"
    for name in (
        *("CUDA_GRAPH", "Q4K_SOA", "PDL", "PREFILL_GEMM", "PREFILL_MMQ", "FUSED_GEMM"),
        *("BLOCK_KERNEL", "LINEAR_GROUP", "FUSED_GEMM_NORM", "FUSED_GEMM_HEADS"),
        *("ATTENTION_IMAGE", "ONE_COPY", "MEGAKERNEL", "MEGAKERNEL_PAIRS", "DECODE_CHAIN"),
        *("BATCH_STEP", "INT8_ACTIVATIONS", "EXACT", "OVERLAP", "PREFIX_CACHE"),
        *("SYNC_DEBUG", "MOE_KERNEL", "MOE_TILES", "SPARSE_ATTENTION_KERNEL", "INDEXER_KERNEL"),
        *("MOE_GEMM", "MHC_KERNEL", "ROPE_KERNEL", "ROUTE_KERNEL"),
        *("COMPRESS_KERNEL", "NATIVE"),
        *("SMALL_ALL_REDUCE", "CPU_RANKS"),
    )
)
_SETTINGS = (
    *("TIERCEL_MODEL", "TIERCEL_CACHE", "TIERCEL_OFFLINE", "TIERCEL_FAULTS", "TIERCEL_CPU"),
    "TIERCEL_BUILD_NATIVE",  # of the build hook
    "TIERCEL_PREFETCH_KEYS",
    "TIERCEL_TEST_MODELS",  # of the project's tests
)
# What an engine on another host has from the server; paths of caches are those of its host.
_SHARED = (
    *(*_SWITCHES, "TIERCEL_PREFETCH_KEYS", "TIERCEL_CPU"),
    *("TIERCEL_MODEL", "TIERCEL_OFFLINE", "TIERCEL_FAULTS"),
)
_PREFIX = "TIERCEL_"
_CUTOFF = 0.57  # of difflib, after the prefix: SERVE_PORT is near PORT, SERVICE_HOST is not
# Secrets of the server and of its trace collector: only the server's own process needs them.
_SERVER_SECRETS = (
    *("TIERCEL_API_KEY", "TIERCEL_API_KEY_FILE"),
    *("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"),
)
_HUB_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def read_flag(name: str, *, default: bool) -> bool:
    """Read a switch.

    Args:
        name: the variable, for instance ``TIERCEL_OFFLINE``.
        default: the value when it is unset or empty.

    Raises:
        ArgumentError: the value is neither 0 nor 1.
    """
    text = os.environ.get(name, "")
    if not text:
        return default
    if text not in _BOOLEANS:
        raise ArgumentError(f"{name}={text!r} cannot be read.", hint="Use 0 or 1.")
    return _BOOLEANS[text]


def read_integer(name: str, *, default: int) -> int:
    """Read a decimal integer, with or without a sign.

    Args:
        name: the variable.
        default: the value when it is unset or empty.

    Raises:
        ArgumentError: the value is anything else.
    """
    text = os.environ.get(name, "")
    if not text:
        return default
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text) is None:
        raise ArgumentError(f"{name}={text!r} cannot be read.", hint="Use a decimal integer.")
    return int(text)


def is_offline() -> bool:
    """Whether ``TIERCEL_OFFLINE`` forbids every download."""
    return read_flag("TIERCEL_OFFLINE", default=False)


def has_prefix_cache() -> bool:
    """Whether ``TIERCEL_PREFIX_CACHE`` allows the prefix cache."""
    return read_flag("TIERCEL_PREFIX_CACHE", default=True)


def has_cuda_graphs() -> bool:
    """Whether ``TIERCEL_CUDA_GRAPH`` allows steps to be captured in CUDA graphs."""
    return read_flag("TIERCEL_CUDA_GRAPH", default=True)


def has_q4k_soa() -> bool:
    """Whether ``TIERCEL_Q4K_SOA`` lets a GPU repack K-quants into planes, else as in the file."""
    return read_flag("TIERCEL_Q4K_SOA", default=True)


def has_dependent_launch() -> bool:
    """Whether ``TIERCEL_PDL`` allows programmatic dependent launch of kernels."""
    return read_flag("TIERCEL_PDL", default=True)


def has_prefill_gemm() -> bool:
    """Whether ``TIERCEL_PREFILL_GEMM`` lets many tokens leave `packed_matvec`, 16 tokens at a time.

    ``TIERCEL_EXACT`` keeps them there, because only its bits do not depend on their number.
    """
    return read_flag("TIERCEL_PREFILL_GEMM", default=True) and not is_exact()


def has_moe_kernel() -> bool:
    """Whether ``TIERCEL_MOE_KERNEL`` lets kernels multiply by routed experts as they are stored."""
    return read_flag("TIERCEL_MOE_KERNEL", default=True)


def has_moe_tiles() -> bool:
    """Whether ``TIERCEL_MOE_TILES`` lets a GPU rearrange routed experts for one kernel of theirs.

    ``TIERCEL_MOE_KERNEL`` can forbid it too.
    """
    return read_flag("TIERCEL_MOE_TILES", default=True) and has_moe_kernel()


def has_moe_gemm() -> bool:
    """Whether ``TIERCEL_MOE_GEMM`` lets Hopper multiply prompts by routed experts at its own speed.

    The bits differ from those of a few tokens, so ``TIERCEL_EXACT`` forbids it.
    """
    return read_flag("TIERCEL_MOE_GEMM", default=True) and has_moe_tiles() and not is_exact()


def has_fused_gemm() -> bool:
    """Whether ``TIERCEL_FUSED_GEMM`` lets some dozens of tokens use packed K-quants."""
    return read_flag("TIERCEL_FUSED_GEMM", default=True)


def has_fused_gemm_norm() -> bool:
    """Whether ``TIERCEL_FUSED_GEMM_NORM`` lets those products norm the residual.

    Off until a GPU has shown that its results are right. ``TIERCEL_FUSED_GEMM`` can forbid it too.
    """
    return read_flag("TIERCEL_FUSED_GEMM_NORM", default=False) and has_fused_gemm()


def has_fused_gemm_heads() -> bool:
    """Whether ``TIERCEL_FUSED_GEMM_HEADS`` lets those products rotate heads and write the cache.

    Off until a GPU has shown that it gains. ``TIERCEL_FUSED_GEMM`` can forbid it too.
    """
    return read_flag("TIERCEL_FUSED_GEMM_HEADS", default=False) and has_fused_gemm()


def prefetched_keys() -> int:
    """Bytes of keys and values that products of ``TIERCEL_FUSED_GEMM_HEADS`` request to the L2.

    ``TIERCEL_PREFETCH_KEYS`` has them in MB; none until a GPU has shown that they gain.

    Raises:
        ArgumentError: the number is negative.
    """
    count = read_integer("TIERCEL_PREFETCH_KEYS", default=0)
    if count < 0:
        raise ArgumentError(f"TIERCEL_PREFETCH_KEYS={count}: MB are not negative.", hint="Use 24.")
    return count * 1_000_000


def has_attention_image() -> bool:
    """Whether ``TIERCEL_ATTENTION_IMAGE`` lets attention write what those products read.

    Off until a GPU has shown that it gains. ``TIERCEL_FUSED_GEMM`` can forbid it too.
    """
    return read_flag("TIERCEL_ATTENTION_IMAGE", default=False) and has_fused_gemm()


def has_block_kernel() -> bool:
    """Whether ``TIERCEL_BLOCK_KERNEL`` lets a GPU decode and multiply block formats by kernels.

    Without, PyTorch operators decode them in each product.
    """
    return read_flag("TIERCEL_BLOCK_KERNEL", default=True)


def has_linear_group() -> bool:
    """Whether ``TIERCEL_LINEAR_GROUP`` lets matrices of one x be multiplied in one launch.

    For a few tokens of DeepSeek-V4; more take other kernels, so with ``TIERCEL_EXACT`` a step has
    no more.
    """
    return read_flag("TIERCEL_LINEAR_GROUP", default=True)


def has_prefill_mmq() -> bool:
    """Whether ``TIERCEL_PREFILL_MMQ`` rounds many tokens to 8 bits for every product that can.

    Off: on an H200 another path was faster at every size (docs/notes/packed_products.md).
    ``TIERCEL_INT8_ACTIVATIONS`` can forbid it too.
    """
    return read_flag("TIERCEL_PREFILL_MMQ", default=False) and has_int8_activations()


def is_exact() -> bool:
    """Whether ``TIERCEL_EXACT`` requires kernels whose bits do not depend on the batch."""
    return read_flag("TIERCEL_EXACT", default=False)


def has_int8_activations() -> bool:
    """Whether ``TIERCEL_INT8_ACTIVATIONS`` lets a kernel round activations to 8 bits."""
    return read_flag("TIERCEL_INT8_ACTIVATIONS", default=True)


def has_megakernel() -> bool:
    """Whether ``TIERCEL_MEGAKERNEL`` allows the fused decode step for a single token.

    It rounds activations to 8 bits and its bits differ from those of the kernels for more tokens,
    so the two switches above can forbid it too.
    """
    is_on = read_flag("TIERCEL_MEGAKERNEL", default=True)
    return is_on and has_int8_activations() and not is_exact()


def has_megakernel_pairs() -> bool:
    """Whether ``TIERCEL_MEGAKERNEL_PAIRS`` lets that step take two tokens.

    Off until it is timed on a GPU. What forbids the step of one token forbids it too.
    """
    return read_flag("TIERCEL_MEGAKERNEL_PAIRS", default=False) and has_megakernel()


def has_one_copy() -> bool:
    """Whether ``TIERCEL_ONE_COPY`` lets all kernels read the weights of the fused decode step.

    Else it has a copy of its own. Off: several requests are a quarter to a third slower. Where
    there is no fused decode step it has no effect.
    """
    return read_flag("TIERCEL_ONE_COPY", default=False) and has_megakernel()


def has_untimed_step() -> bool:
    """Whether ``TIERCEL_MEGAKERNEL=1`` asks for that step also in forms that were not timed."""
    return read_flag("TIERCEL_MEGAKERNEL", default=False)


def fused_decode_step_switch() -> str:
    """The toggle that `has_megakernel` obeys where it is false, as ``NAME=value``; else ""."""
    if not has_int8_activations():
        return "TIERCEL_INT8_ACTIVATIONS=0"
    return _first_of("TIERCEL_MEGAKERNEL")


def fused_layer_tail_switch() -> str:
    """The toggle that `has_fused_layer_tail` obeys where it is false, likewise."""
    return _first_of("TIERCEL_DECODE_CHAIN")


def _first_of(name: str) -> str:
    if not read_flag(name, default=True):
        return f"{name}=0"
    return "TIERCEL_EXACT=1" if is_exact() else ""


def has_fused_layer_tail() -> bool:
    """Whether ``TIERCEL_DECODE_CHAIN`` allows the fused layer tail, from attention to attention.

    It serves a few tokens. Its bits differ from single kernels, so ``TIERCEL_EXACT`` forbids it.
    """
    return read_flag("TIERCEL_DECODE_CHAIN", default=True) and not is_exact()


def has_batch_step() -> bool:
    """Whether ``TIERCEL_BATCH_STEP`` lets one kernel run all layers where the layer tail fits.

    It serves steps of up to 16 requests with one new token each. Off until a GPU has run it. Its
    bits differ from those of a step with drafts.
    """
    return read_flag("TIERCEL_BATCH_STEP", default=False)


def has_mhc_kernel() -> bool:
    """Whether ``TIERCEL_MHC_KERNEL`` allows the kernels of mHC, else PyTorch operators."""
    return read_flag("TIERCEL_MHC_KERNEL", default=True)


def has_rope_kernel() -> bool:
    """Whether ``TIERCEL_ROPE_KERNEL`` allows the kernels of latent vectors, likewise."""
    return read_flag("TIERCEL_ROPE_KERNEL", default=True)


def has_route_kernel() -> bool:
    """Whether ``TIERCEL_ROUTE_KERNEL`` allows the kernels of V4's router, likewise."""
    return read_flag("TIERCEL_ROUTE_KERNEL", default=True)


def has_compress_kernel() -> bool:
    """Whether ``TIERCEL_COMPRESS_KERNEL`` allows the kernels of V4's compressors, likewise."""
    return read_flag("TIERCEL_COMPRESS_KERNEL", default=True)


def has_sparse_attention_kernel() -> bool:
    """Whether ``TIERCEL_SPARSE_ATTENTION_KERNEL`` allows the kernel of `sparse_attention`."""
    return read_flag("TIERCEL_SPARSE_ATTENTION_KERNEL", default=True)


def has_indexer_kernel() -> bool:
    """Whether ``TIERCEL_INDEXER_KERNEL`` allows the kernels of `indexer_topk`."""
    return read_flag("TIERCEL_INDEXER_KERNEL", default=True)


def has_small_all_reduce() -> bool:
    """Whether ``TIERCEL_SMALL_ALL_REDUCE`` allows the kernel of `all_reduce`, else NCCL."""
    return read_flag("TIERCEL_SMALL_ALL_REDUCE", default=True)


def has_native() -> bool:
    """Whether ``TIERCEL_NATIVE`` allows the native library on a CPU, else PyTorch operators."""
    return read_flag("TIERCEL_NATIVE", default=True)


def forced_cpu() -> str:
    """``TIERCEL_CPU``: name of the native library's variant to use; "" for the fastest."""
    return os.environ.get("TIERCEL_CPU", "")


def has_cpu_ranks() -> bool:
    """Whether ``TIERCEL_CPU_RANKS`` allows several ranks on a CPU: for tests, they gain nothing."""
    return read_flag("TIERCEL_CPU_RANKS", default=False)


def has_overlap(*, default: bool) -> bool:
    """Whether ``TIERCEL_OVERLAP`` lets a step be enqueued while the previous step runs."""
    return read_flag("TIERCEL_OVERLAP", default=default)


def is_sync_debug() -> bool:
    """Whether ``TIERCEL_SYNC_DEBUG`` makes waiting for the device within a step an error."""
    return read_flag("TIERCEL_SYNC_DEBUG", default=False)


def switches() -> dict[str, str]:
    """The toggles that are set, for reports: names and values.

    Raises:
        ArgumentError: a value is neither 0 nor 1.
    """
    found = [name for name in _SWITCHES if os.environ.get(name, "")]
    return {name: str(int(read_flag(name, default=False))) for name in found}


def unknown_variables(options: Iterable[str]) -> tuple[str, ...]:
    """The ``TIERCEL_`` variables that are set but neither read here nor in `options`."""
    known = {*_SWITCHES, *_SETTINGS, *options}
    found = (name for name, value in os.environ.items() if name.startswith(_PREFIX) and value)
    return tuple(sorted(name for name in found if name not in known))


def nearest_variable(name: str, options: Iterable[str]) -> str | None:
    """The variable, of those read here and `options`, that a wrong name probably means."""
    known = [other.removeprefix(_PREFIX) for other in sorted({*_SWITCHES, *_SETTINGS, *options})]
    nearest = difflib.get_close_matches(name.removeprefix(_PREFIX), known, 1, _CUTOFF)
    return f"{_PREFIX}{nearest[0]}" if nearest else None


def default_model_path() -> Path | None:
    """The path in ``TIERCEL_MODEL``, or None when it is unset."""
    text = os.environ.get("TIERCEL_MODEL", "")
    return Path(text) if text else None


def cache_dir() -> Path:
    """``TIERCEL_CACHE``, else the user's cache folder of this platform; it may not exist yet."""
    text = os.environ.get("TIERCEL_CACHE", "")
    return Path(text) if text else Path(platformdirs.user_cache_dir("tiercel", appauthor=False))


def hub_endpoint() -> str:
    """``HF_ENDPOINT``, the address of the model hub or of a mirror of it, without a final slash."""
    return (os.environ.get("HF_ENDPOINT", "") or "https://huggingface.co").rstrip("/")


def faults() -> str:
    """The faults that ``TIERCEL_FAULTS`` injects into the engine; "" for none."""
    return os.environ.get("TIERCEL_FAULTS", "")


def shared_variables() -> dict[str, str]:
    """The variables of this process that an engine on another host must have too."""
    return {name: value for name in _SHARED if (value := os.environ.get(name, ""))}


def child_environment(
    *, has_hub_token: bool = False, shared: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment that a child process (pip, the engine) inherits: this one without secrets.

    Args:
        has_hub_token: whether the child uses the model hub, so that it needs the hub's token.
        shared: `shared_variables` of the server on another host, in place of this host's; None:
            the server is this process.
    """
    hidden = {*_SERVER_SECRETS, *(() if has_hub_token else _HUB_SECRETS)}
    if shared is not None:
        # Ray sets the last one to the CPUs that it reserves, 1 for an engine on a GPU.
        hidden.update((*_SHARED, "OMP_NUM_THREADS"))
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    return inherited | dict(shared or {})


def forbid_multicast() -> None:
    """Keep PyTorch and NCCL from NVLink multicast, whatever was set; call it before either starts.

    A program that ends while it uses multicast can leave the GPUs of a host out of service.
    """
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"


def forbid_nccl_monitor() -> None:
    """Keep PyTorch's watch over NCCL's own from running; call it before ranks connect.

    It asks the file under which ranks have met, which is gone when the model runs, and says so in a
    warning. Ranks that hang are noticed by `ipc/ranks.py`.
    """
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"


def shorten_openmp_spins() -> None:
    """Shorten the spinning of PyTorch's CPU threads; call before PyTorch is imported.

    GNU OpenMP spins up to milliseconds at each join. On an idle machine 3,000 turns (about 50 us)
    are as fast; on a busy machine loading took up to 19 s by default and 3.5 s with 3,000
    (docs/notes/cpu_decode.md). A value that the user set stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
