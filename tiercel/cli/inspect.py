"""`tiercel inspect`: the contents of a model file and the memory plan; no weights are loaded.

Free of PyTorch. It uses the same reader as loading: a file that it refuses cannot be loaded.
"""

from __future__ import annotations

import json as json_module
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from tiercel import env
from tiercel.cli.options import CommonOptions, ModelName
from tiercel.cli.terminal import ProgressReporter, one_line, say, write

if TYPE_CHECKING:
    from tiercel.models.config import ModelConfig
    from tiercel.models.sharding import Sharding
    from tiercel.models.source import ModelSource
    from tiercel.quant_types import QuantType

_GROUP = Group("Inspection", sort_key=1)
_MAX_SHOWN = 60  # characters of one metadata value
_KV_DTYPE = "bfloat16"  # of keys and values by default: 16 bits each
_DEVICE_NAMES = {"cpu": "on a CPU", "cuda": "on a GPU"}
_LABEL_WIDTH = 22
# As their driver reports it, and the device of `gpus` must have.
GPU_BYTES = {"H100, 80 GB": 79 * 2**30, "H200, 141 GB": 139 * 2**30}
_DTYPES = ("float16", "bfloat16", "float32")  # in the order of `--dtype auto`: docs/models.md


def inspect_model(
    model: ModelName = None,
    *,
    tensors: Annotated[bool, Parameter(group=_GROUP, help="List every tensor.")] = False,
    tokenizer: Annotated[bool, Parameter(group=_GROUP, help="Show the tokenizer.")] = False,
    template: Annotated[bool, Parameter(group=_GROUP, help="Print the chat template.")] = False,
    verify: Annotated[
        bool, Parameter(group=_GROUP, help="Read all weights; refuse NaN and infinity.")
    ] = False,
    tensor_parallel_size: Annotated[
        int,
        Parameter(
            name=("--tensor-parallel-size", "-tp"),
            group=_GROUP,
            help="Show the memory of each of so many GPUs.",
        ),
    ] = 1,
    expert_parallel: Annotated[
        bool, Parameter(group=_GROUP, help="With whole experts on each of them.")
    ] = False,
    data_parallel_attention: Annotated[
        bool, Parameter(group=_GROUP, help="With requests of its own on each of them.")
    ] = False,
    json: Annotated[bool, Parameter(group=_GROUP, help="Write one JSON object.")] = False,
    offline: Annotated[bool, Parameter(group=_GROUP, help="Never download.")] = False,
    common: CommonOptions = CommonOptions(),  # noqa: B008 - frozen
) -> int:
    """Check a model file and show its header, sizes and memory plan."""
    from tiercel.loader.hub import resolve
    from tiercel.models.shard_check import check_sharding
    from tiercel.models.sharding import sharding_kind
    from tiercel.models.source import open_source

    with ProgressReporter(is_quiet=common.quiet) as report:
        path = resolve(model, offline=offline, report=report)
        source = open_source(path)
        kind = sharding_kind(
            expert_parallel=expert_parallel, data_parallel_attention=data_parallel_attention
        )
        check_sharding(source, tensor_parallel_size, kind)
        problems = _verify(source, report) if verify else []
    facts = describe(source)
    if tensor_parallel_size > 1:
        facts["gpus"] = _gpu_facts(source, kind.of(0, tensor_parallel_size))
    if tokenizer:
        facts["tokenizer"] = _tokenizer_facts(source)
    if tensors:
        facts["tensors"] = _tensor_rows(source)
    if template:
        facts["chat_template"] = source.chat_template
    if verify:
        facts["verified"] = not problems
        facts["problems"] = problems
    if json:
        write(json_module.dumps(facts, indent=2) + "\n")
    else:
        _print_facts(facts)
    for problem in problems:
        say("error", f"{source.path.name}: {problem}", "Fetch or convert the model again.")
    return 1 if problems else 0


def describe(source: ModelSource) -> dict[str, Any]:
    """The facts that need only the header, as plain JSON values."""
    config = source.config
    return {
        "file": {
            "path": str(source.path),
            "format": _format_name(source),
            "size_bytes": source.files.size_bytes,
            "num_tensors": len(source.tensors),
            "notes": list(getattr(source.files, "notes", ())),
        },
        "general": _general(source.metadata),
        "config": _config_facts(source),
        "weights": _quantisation_mix(source),
        "memory": _memory(source),
        "runs": {
            "architecture": config.arch,
            "is_supported": True,
            "devices": ["cpu", "cuda"],
            "has_tokenizer": source.has_text,
            "has_chat_template": source.chat_template is not None,
            "draft_head": _draft_head(config),
            "switches": env.switches(),
            "fused_kernels": _fused_kernels(source),
        },
    }


def _draft_head(config: ModelConfig) -> str:
    """Whether the file has a head that drafts, or why the one it has cannot."""
    return config.no_draft_head or ("mtp" if config.num_mtp_layers else "none")


def _fused_kernels(source: ModelSource) -> dict[str, str]:
    """Of each fused kernel, whether it fits the model on a Hopper GPU, or why not."""
    from tiercel.models.fused_paths import refuse_model

    refusals = refuse_model(source)
    return {name: "fits" if no is None else no.reason for name, no in refusals.items()}


def _memory(source: ModelSource) -> dict[str, Any]:
    """Memory of weights, keys and values, on each device and in each dtype."""
    from tiercel.machine import read_memory
    from tiercel.models.footprint import cache_bytes, weight_footprint
    from tiercel.models.fused_paths import step_copy_bytes

    config = source.config
    here = read_memory()
    at_rest = {
        device: {
            footprint.dtype: {"weight_bytes": footprint.nbytes, "forms": dict(footprint.forms)}
            for footprint in (weight_footprint(source, dtype, device) for dtype in dtypes)
        }
        for device, dtypes in (("cpu", _cpu_dtypes()), ("cuda", _DTYPES))
    }
    return {
        "file_weight_bytes": source.weight_bytes,
        "at_rest": at_rest,
        "step_copy_bytes": step_copy_bytes(source),
        "kv_bytes_per_1000_tokens": cache_bytes(config, 1000, _KV_DTYPE),
        "kv_bytes_full_context": cache_bytes(config, config.max_position, _KV_DTYPE),
        "available_bytes": None if here is None else here.available,
        "limit_bytes": None if here is None else here.limit,
    }


def _gpu_facts(source: ModelSource, rank: Sharding) -> dict[str, Any]:
    """Memory of each of several GPUs that share the model, and how many GPUs would fit it.

    rank: that of the largest part, rank 0.
    """
    from tiercel.config import LoadOptions
    from tiercel.models.footprint import cache_bytes, gpus_that_fit, weight_footprint
    from tiercel.models.fused_paths import refuse_step, step_copy_bytes

    dtype = source.family.auto_dtypes.get("cuda", _DTYPES[source.format != "gguf"])
    weights = weight_footprint(source, dtype, "cuda", sharding=rank)
    context = source.config.max_position
    kept = cache_bytes(source.config, context, dtype, sharding=rank)
    share = LoadOptions().gpu_memory_utilization
    no_step = refuse_step(source, rank)
    return {
        "tensor_parallel_size": rank.size,
        "expert_parallel": rank.expert_parallel,
        "data_parallel_attention": not rank.tensor_parallel,
        "dtype": dtype,
        "split_weight_bytes": weights.nbytes - weights.whole_bytes,
        "whole_weight_bytes": weights.whole_bytes,
        "step_copy_bytes": step_copy_bytes(source, rank),
        "fused_decode_step": "fits" if no_step is None else no_step.reason,
        "kv_bytes_full_context": kept,
        "bytes_per_gpu": weights.nbytes + kept,
        "fits": {
            name: gpus_that_fit(source, dtype, context, int(share * memory), kind=rank)
            for name, memory in GPU_BYTES.items()
        },
    }


def _cpu_dtypes() -> tuple[str, ...]:
    from tiercel.resting import uses_native

    return _DTYPES if uses_native("cpu") else _DTYPES[1:]


def _format_name(source: ModelSource) -> str:
    version = getattr(source.files, "version", None)  # GGUF files have one
    return "safetensors folder" if version is None else f"GGUF version {version}"


def _general(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Name, author, licence and the like: scalars that describe the file."""
    general: dict[str, Any] = {
        key.removeprefix("general."): value
        for key, value in metadata.items()
        if key.startswith("general.") and isinstance(value, str | int | float | bool)
    }
    for key in ("architectures", "model_type", "transformers_version"):
        value = metadata.get(key)
        if isinstance(value, str) or (isinstance(value, list) and len(str(value)) < _MAX_SHOWN):
            general[key] = value
    return general


def _config_facts(source: ModelSource) -> dict[str, Any]:
    facts = asdict(source.config)
    kinds = source.config.layer_types
    facts["layer_types"] = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    facts.pop("compress_ratios", None)  # the types of layers say it
    facts.pop("no_draft_head")
    return {
        key: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        for key, value in facts.items()
        if value is not None
    }


def _quantisation_mix(source: ModelSource) -> list[dict[str, Any]]:
    """Tensors, weights and bytes of each format, the largest first."""
    mix: dict[str, dict[str, Any]] = {}

    def add(qtype: QuantType, num_tensors: int, shape: tuple[int, ...], num_bytes: int) -> None:
        empty = {"type": qtype.name, "tensors": 0, "weights": 0, "bytes": 0}
        row = mix.setdefault(qtype.name, empty)
        row["tensors"] += num_tensors
        row["weights"] += math.prod(shape)
        row["bytes"] += num_bytes

    for weight in source.stored.values():
        num_tensors = sum(len(names) for names in weight.planes.values())
        add(weight.qtype, num_tensors, weight.shape, weight.nbytes)
    for tensor in () if source.stored else source.tensors.values():
        add(tensor.qtype, 1, tensor.shape, tensor.nbytes)
    return sorted(mix.values(), key=lambda row: -row["bytes"])


def _tensor_rows(source: ModelSource) -> list[dict[str, Any]]:
    return [
        {
            "name": tensor.name,
            "type": tensor.qtype.name,
            "shape": list(reversed(tensor.dims)),
            "bytes": tensor.nbytes,
            "offset": tensor.offset,
        }
        for tensor in source.tensors.values()
    ]


def _tokenizer_facts(source: ModelSource) -> dict[str, Any]:
    tokenizer = source.tokenizer()

    def name(token_id: int | None) -> str | None:
        if token_id is None:
            return None
        return (
            f"{tokenizer.token_text(token_id)} ({token_id})" if source.has_text else f"{token_id}"
        )

    return {
        "vocab_size": tokenizer.vocab_size,
        "control_tokens": len(tokenizer.control_tokens),
        "bos": name(tokenizer.bos_id),
        "eos": name(tokenizer.eos_id),
        "pad": name(tokenizer.pad_id),
        "stop": [name(token_id) for token_id in tokenizer.stop_ids],
        "adds_bos": tokenizer.add_bos,
        "adds_eos": tokenizer.add_eos,
    }


def _verify(source: ModelSource, report: ProgressReporter) -> list[str]:
    total = sum(tensor.nbytes for tensor in source.tensors.values())
    found = source.verify(lambda done: report("Reading all weights", done, total))
    return [str(problem) for problem in found]


def _print_facts(facts: dict[str, Any]) -> None:
    """Write the facts as aligned lines."""
    file = facts["file"]
    _print_row("file", file["path"])
    _print_row("format", f"{file['format']}, {_size(file['size_bytes'])}")
    for text in file["notes"]:
        _print_row("note", text)
    _print_section("General", facts["general"])
    _print_section("Hyperparameters", facts["config"])
    write("\nWeights\n")
    total = sum(row["bytes"] for row in facts["weights"])
    for row in facts["weights"]:
        share = f"{row['tensors']:>5} tensors {row['weights'] / 1e6:>10.1f} M weights"
        share += f" {_size(row['bytes']):>10} {row['bytes'] / total:>6.1%}"
        _print_row(row["type"], share)
    write("\nMemory\n")
    _print_memory(facts["memory"], facts["config"]["max_position"])
    _print_gpus(facts.get("gpus"), facts["config"]["max_position"])
    runs = facts["runs"]
    write("\nRuns\n")
    uses = "generate and chat" if runs["has_chat_template"] else "generate (no chat template)"
    if not runs["has_tokenizer"]:
        uses = "token ids alone (no tokenizer.json)"
    _print_row(runs["architecture"], f"supported: {uses}, on CPU or CUDA")
    _print_row("draft head", runs["draft_head"])
    for name, value in runs["switches"].items():
        _print_row(name, value)
    _print_section("Fused kernels (H100/H200, float16)", runs["fused_kernels"])
    if "tokenizer" in facts:
        _print_section("Tokenizer", facts["tokenizer"])
    if "tensors" in facts:
        write("\nTensors\n")
        for row in facts["tensors"]:
            shape = " x ".join(str(size) for size in row["shape"])
            write(f"  {_short(row['name']):<40} {row['type']:<6} {shape:<18} {row['offset']}\n")
    if "chat_template" in facts:
        write(f"\nChat template\n{facts['chat_template'] or '(none)'}\n")
    if facts.get("verified"):
        write("\nEvery weight was read: no NaN, no infinity.\n")


def _print_memory(memory: Mapping[str, Any], context: int) -> None:
    _print_row("weights in the file", _size(memory["file_weight_bytes"]))
    for device, dtypes in memory["at_rest"].items():
        for dtype, weights in dtypes.items():
            parts = (f"{name} {_size(size)}" for name, size in weights["forms"].items() if size)
            shown = f"{_size(weights['weight_bytes'])} ({', '.join(parts)})"
            _print_row(f"{_DEVICE_NAMES[device]}, {dtype}", shown)
    if memory["step_copy_bytes"]:
        _print_row("and for a fused step", _size(memory["step_copy_bytes"]))
    _print_row("per 1000 tokens", _size(memory["kv_bytes_per_1000_tokens"]))
    _print_row(f"all {context} tokens", _size(memory["kv_bytes_full_context"]))
    if memory["available_bytes"] is not None:
        limit = memory["limit_bytes"]
        bound = "" if limit is None else f", within a limit of {_size(limit)}"
        _print_row("available here", _size(memory["available_bytes"]) + bound)


def _print_gpus(gpus: Mapping[str, Any] | None, context: int) -> None:
    if gpus is None:
        return
    kind = "whole experts" if gpus["expert_parallel"] else "tensor parallel"
    if gpus["data_parallel_attention"]:
        kind = "requests of its own, whole experts"
    write(f"\nEach of {gpus['tensor_parallel_size']} GPUs ({kind}, {gpus['dtype']})\n")
    _print_row("its part of weights", _size(gpus["split_weight_bytes"]))
    _print_row("weights on every GPU", _size(gpus["whole_weight_bytes"]))
    _print_row(f"all {context} tokens", _size(gpus["kv_bytes_full_context"]))
    _print_row("together", _size(gpus["bytes_per_gpu"]))
    if gpus["step_copy_bytes"]:  # made only where there is room for it
        _print_row("and for a fused step", _size(gpus["step_copy_bytes"]))
    _print_row("fused_decode_step", gpus["fused_decode_step"])
    for name, sizes in gpus["fits"].items():
        shown = " or ".join(map(str, sizes))
        _print_row(name, f"fits on {shown} of them" if shown else "does not fit")


def _print_section(title: str, values: Mapping[str, Any]) -> None:
    if not values:
        return
    write(f"\n{title}\n")
    for key, value in values.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        _print_row(key, value)


def _print_row(label: str, value: Any) -> None:
    write(f"  {_short(label):<{_LABEL_WIDTH}} {_short(value)}\n")


def _short(value: Any) -> str:
    """One printable line; long text of a file is cut."""
    text = one_line(str(value))
    return text if len(text) <= 2 * _MAX_SHOWN else text[: 2 * _MAX_SHOWN] + "..."


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"
