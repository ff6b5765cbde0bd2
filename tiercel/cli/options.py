"""The options that several commands share, as dataclasses that cyclopts turns into flags.

Importing this loads no PyTorch: a usage error ends before anything heavy starts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from tiercel.config import MAX_RANKS

MODEL_GROUP = Group("Model", sort_key=2)
SAMPLING_GROUP = Group("Sampling", sort_key=3)
COMMON_GROUP = Group("Common", sort_key=4, show=False)  # `tiercel --help` explains them once

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


def check_device(_type: object, value: str) -> None:
    """Refuse text that cannot name a device; whether the device exists is checked later."""
    if not _DEVICE.fullmatch(value):
        raise ValueError(f"{value!r} is not a device; use auto, cpu, cuda or cuda:N")


def check_ranks(_type: object, value: int) -> None:
    """Refuse a number that is no power of two; how many GPUs there are is checked later."""
    if not 1 <= value <= MAX_RANKS or value & (value - 1):
        raise ValueError(f"{value} is not a power of two up to {MAX_RANKS}; use 1, 2, 4 or 8")


ModelName = Annotated[
    str | None,
    Parameter(
        name=("--model", "-m"),
        group=MODEL_GROUP,
        help="GGUF file, folder, catalogue or hub name [smollm2].",
        show_default=False,
    ),
]


@Parameter(name="*", group=COMMON_GROUP)
@dataclass(frozen=True, slots=True)
class CommonOptions:
    """Options of every command."""

    config: Annotated[Path | None, Parameter(help="TOML file of options; flags override it.")] = (
        None
    )
    verbose: Annotated[
        bool, Parameter(name=("--verbose", "-v"), negative="", help="Say more; show tracebacks.")
    ] = False
    quiet: Annotated[
        bool, Parameter(name=("--quiet", "-q"), negative="", help="Only results and errors.")
    ] = False


@Parameter(name="*", group=MODEL_GROUP)
@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is loaded."""

    device: Annotated[
        str, Parameter(validator=check_device, help="Run on auto, cpu, cuda or cuda:N.")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Parameter(help="Activations: auto, float32, float16 or bfloat16."),
    ] = "auto"
    kv_dtype: Annotated[
        Literal["auto", "fp8", "bf16", "float32"],
        Parameter(help="Keys and values: auto, fp8, bf16 or float32."),
    ] = "auto"
    numerics: Annotated[
        Literal["exact", "native"], Parameter(help="Products: exact or native.")
    ] = "exact"
    max_model_len: Annotated[
        int | None,
        Parameter(
            validator=Number(gte=1),
            help="Context in tokens [the model's, at most 131072].",
            show_default=False,
        ),
    ] = None
    threads: Annotated[
        int | None,
        Parameter(
            validator=Number(gte=1, lte=1024), help="CPU threads; else all.", show_default=False
        ),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        Parameter(
            name=("--tensor-parallel-size", "-tp"),
            validator=check_ranks,
            help="GPUs that compute together.",
        ),
    ] = 1
    expert_parallel: Annotated[
        bool, Parameter(negative="", help="Whole experts on each of several GPUs.")
    ] = False
    data_parallel_attention: Annotated[
        bool, Parameter(negative="", help="Each GPU: own requests, some experts.")
    ] = False
    gpu_memory_utilization: Annotated[
        float,
        Parameter(validator=Number(gt=0, lte=1), help="Share of GPU memory to use."),
    ] = 0.9
    spec: Annotated[
        Literal["off", "ngram", "mtp", "hybrid"],
        Parameter(help="Speculative decoding: off, ngram, mtp or hybrid."),
    ] = "off"
    num_spec_tokens: Annotated[int | None, Parameter(help="Draft tokens in a step [5].")] = None
    offline: Annotated[bool, Parameter(negative="", help="Never download.")] = False


@Parameter(name="*", group=SAMPLING_GROUP)
@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are sampled."""

    max_tokens: Annotated[int | None, Parameter(help="Longest answer.", show_default=False)] = None
    temperature: Annotated[
        float | None, Parameter(help="0 is greedy [the model's, else 0.7].", show_default=False)
    ] = None
    top_p: Annotated[
        float | None,
        Parameter(help="Nucleus sampling; 1 is off [the model's, else 0.95].", show_default=False),
    ] = None
    top_k: Annotated[
        int | None,
        Parameter(help="Most likely tokens to keep [the model's, else all].", show_default=False),
    ] = None
    min_p: Annotated[
        float | None,
        Parameter(help="Least probability, of the best [the model's, else 0].", show_default=False),
    ] = None
    repeat_penalty: Annotated[
        float | None,
        Parameter(help="Above 1 avoids repetition [the model's, else 1].", show_default=False),
    ] = None
    seed: Annotated[int, Parameter(help="Same seed, same answer.")] = 0
