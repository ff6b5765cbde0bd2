"""DeepSeek-V4's layers at true shapes and formats, with random weights drawn on the device.

    python -m benchmarks.deepseek_v4_layers --device cuda --out FILE.json
    python -m benchmarks.deepseek_v4_layers --device cuda --only "43 layers" --out FILE.json

Cases: one layer of each kind of Flash and Pro, four layers of Flash (window, CSA with hash routing,
HCA, CSA), all of Flash with Q2_K experts (100 GB). A decode step is one CUDA graph, so it also
shows that nothing waits for the device. Its requests are at the end of a context of cached vectors.

Floor: the bytes that must move at the measured rate of reading, or the products at that of bfloat16
matrices. Bytes are weights as they rest, of experts those that tokens choose on average; the window
and chosen entries of each token; index keys and HCA entries of the whole context; the streams, read
and written twice a layer. `workspace_bytes` is what a step allocates at its peak, its result
included; the "workspace" slices run up to 1 M tokens of context. A CPU runs a sixteenth of each
size.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.common import environment
from benchmarks.figures import save
from tiercel.batch import Batch
from tiercel.cache.pool import CachePool
from tiercel.cache.spec import CacheGroup, group_specs
from tiercel.config import ModelOptions
from tiercel.models.deepseek_v4 import (
    CSA_RATIO,
    HCA_RATIO,
    DeepseekV4Config,
    entry_bytes,
    read_hf,
)
from tiercel.models.deepseek_v4_model import DeepseekV4
from tiercel.models.deepseek_v4_shards import RULES
from tiercel.models.deepseek_v4_tensors import needed
from tiercel.models.sharding import WHOLE, Sharding
from tiercel.models.weights import WeightReader
from tiercel.profiling.device_timing import graph_us, matrix_tflops, read_gbps, times_us
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.runner.step_inputs import make_timing_batch

BLOCK, SECONDS = 128, 2.0
_COMMON = {
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "n_shared_experts": 1,
    "num_experts_per_tok": 6, "index_n_heads": 64, "index_head_dim": 128, "sliding_window": 128,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "num_nextn_predict_layers": 0,
    "rope_theta": 10000, "compress_rope_theta": 160000, "swiglu_limit": 10.0, "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
                     "beta_fast": 32, "beta_slow": 1},
    "max_position_embeddings": 1048576, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
    "topk_method": "noaux_tc", "vocab_size": 129280, "tie_word_embeddings": False,
}  # fmt: skip
FLASH = _COMMON | {
    "hidden_size": 4096, "num_attention_heads": 64, "q_lora_rank": 1024, "o_groups": 8,
    "o_lora_rank": 1024, "n_routed_experts": 256, "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5, "index_topk": 512,
}  # fmt: skip
PRO = _COMMON | {
    "hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16,
    "o_lora_rank": 1024, "n_routed_experts": 384, "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5, "index_topk": 1024,
}  # fmt: skip
_SIXTEENTH = (
    "hidden_size", "q_lora_rank", "o_lora_rank", "n_routed_experts", "moe_intermediate_size",
    "vocab_size", "index_topk",
)  # fmt: skip
FLASH_RATIOS = [0, 0, *[CSA_RATIO, HCA_RATIO] * 20, CSA_RATIO]
# Format of each matrix by its name; those that are not named rest in bfloat16.
_FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "shared_experts")
E4M3_RMS, E2M1_RMS = 147.0, 2.93  # of random bytes, NaN aside


@dataclass(frozen=True)
class Slice:
    """Some layers of a model.

    Attributes:
        name: in words.
        values: of a `config.json`.
        ratios: tokens per compressed entry of each layer.
        num_hash_layers: layers that route by token id, the first ones.
        experts: how experts rest.
        is_whole: whether all sizes of steps are timed, not some alone.
        contexts: lengths of context at which one token and 64 are timed instead.
    """

    name: str
    values: dict[str, Any]
    ratios: list[int]
    num_hash_layers: int = 0
    experts: QuantType = QuantType.MXFP4
    is_whole: bool = False
    contexts: tuple[int, ...] = ()

    def config(self, device: torch.device) -> DeepseekV4Config:
        """The shape of these layers, on a CPU smaller."""
        values = self.values | {
            "num_hidden_layers": len(self.ratios),
            "compress_ratios": self.ratios,
            "num_hash_layers": self.num_hash_layers,
        }
        if device.type == "cpu":
            values |= {key: self.values[key] // 16 for key in _SIXTEENTH}
        return read_hf(values, self.name)


def slices() -> list[Slice]:
    """One layer of each kind, four layers, and all of Flash."""
    kinds = {"window": 0, "CSA": CSA_RATIO, "HCA": HCA_RATIO}
    found = [Slice(f"Flash, {kind} layer", FLASH, [ratio]) for kind, ratio in kinds.items()]
    found.append(Slice("Flash, CSA layer, hash routing", FLASH, [CSA_RATIO], 1))
    found += [Slice(f"Pro, {kind} layer", PRO, [kinds[kind]]) for kind in ("CSA", "HCA")]
    four = [0, CSA_RATIO, HCA_RATIO, CSA_RATIO]
    found.append(Slice("Flash, 4 layers", FLASH, four, 2, is_whole=True))
    nvfp4 = Slice("Flash, 4 layers, NVFP4 experts", FLASH, four, 2, QuantType.NVFP4)
    q2_k = Slice("Flash, 43 layers, Q2_K experts", FLASH, FLASH_RATIOS, 3, QuantType.Q2_K)
    for kind in ("CSA", "HCA"):
        name, ratios = f"Flash, {kind} layer, workspace", [kinds[kind]]
        contexts = tuple(1 << bits for bits in range(12, 21, 2))
        found.append(Slice(name, FLASH, ratios, contexts=contexts))
    return [*found, nvfp4, replace(q2_k, is_whole=True)]


class RandomWeights:
    """Draws the weights of a config on a device: what a model asks of a `WeightReader`."""

    dense_copies = False

    def __init__(
        self,
        config: DeepseekV4Config,
        device: torch.device,
        experts: QuantType,
        sharding: Sharding = WHOLE,
    ) -> None:
        self.device = device
        self.sharding = sharding
        self.num_bytes: dict[str, int] = {}
        self._config = config
        self._shapes = {need.name: need.shape for need in needed(config)}
        if sharding.size > 1:
            for name, shape in self._shapes.items():
                cut = RULES.cut(config, sharding, name)
                self._shapes[name] = shape if cut is None else cut.shape(shape)
        self._experts = experts
        self._generator = torch.Generator(device).manual_seed(1)

    def weight(self, name: str) -> QuantTensor:
        """A matrix or a stack in the format that its name has in released files."""
        shape = self._shapes[name]
        if "ffn.experts." in name:
            made = self._quantised(self._experts, shape)
        elif "compressor" not in name and any(part in name for part in _FP8):
            made = self._quantised(QuantType.FP8_BLOCK, shape)
        else:
            data = self._normal(shape).bfloat16().view(torch.uint8)
            made = QuantTensor(QuantType.BF16, Layout.FILE, shape, {"data": data})
        self.num_bytes[name] = made.nbytes
        return made

    def vector(self, name: str) -> Tensor:
        """A vector: norms are about 1."""
        around = 1.0 if "norm" in name else 0.0
        return around + 0.3 * self._randn(self._shapes[name])

    def floats(self, name: str) -> Tensor:
        """A float32 matrix."""
        return self._normal(self._shapes[name])

    def integers(self, name: str) -> Tensor:
        """Distinct experts of each token id."""
        rows, topk = self._shapes[name]
        scores = torch.rand(
            (rows, self._config.num_experts), generator=self._generator, device=self.device
        )
        return scores.topk(topk, dim=1).indices

    def _randn(self, shape: tuple[int, ...]) -> Tensor:
        drawn: Tensor = torch.randn(shape, generator=self._generator, device=self.device)
        return drawn

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        return self._randn(shape) / math.sqrt(shape[-1])

    def _bytes(self, *shape: int) -> Tensor:
        """Random bytes."""
        return torch.randint(
            0, 256, shape, dtype=torch.uint8, generator=self._generator, device=self.device
        )

    def _constant(self, shape: tuple[int, ...], value: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.uint8, device=self.device)

    def _quantised(self, qtype: QuantType, shape: tuple[int, ...]) -> QuantTensor:
        """Random values with one scale for all, of variance 1 / columns."""
        *stack, rows, cols = shape
        if qtype is QuantType.FP8_BLOCK:
            q = self._bytes(*shape)
            q[(q & 0x7F) == 0x7F] = 0  # NaN
            scale = self._constant((*stack, -(-rows // 128), -(-cols // 128)), 0)
            scale.fill_(127 - round(math.log2(E4M3_RMS * cols**0.5)))
            planes = {"q": q.view(torch.float8_e4m3fn), "scale": scale}
            return QuantTensor(qtype, Layout.BLOCKS, shape, planes, (128, 128))
        exponent = round(math.log2(E2M1_RMS * cols**0.5))
        if qtype is QuantType.MXFP4:
            scale = self._constant((*stack, rows, cols // 32), 127 - exponent)
            planes = {"q": self._bytes(*stack, rows, cols // 2), "scale": scale}
            return QuantTensor(qtype, Layout.BLOCKS, shape, planes)
        if qtype is QuantType.NVFP4:
            ones = torch.ones((*stack, rows, cols // 16), device=self.device)
            planes = {
                "q": self._bytes(*stack, rows, cols // 2),
                "scale": ones.to(torch.float8_e4m3fn),
                "global_scale": torch.full(stack, 2.0**-exponent, device=self.device),
            }
            return QuantTensor(qtype, Layout.BLOCKS, shape, planes)
        assert qtype is QuantType.Q2_K
        blocks = self._bytes(*stack, rows, cols // 256, qtype.block_bytes)
        # The two factors at the end of a block, as float16: values are 0..3 times 0..15.
        factors = torch.tensor([1 / (12 * cols**0.5), 1.5 / (12 * cols**0.5)]).half()
        blocks[..., 80:] = factors.view(torch.uint8).to(self.device)
        return QuantTensor(qtype, Layout.FILE, shape, {"data": blocks.flatten(-2)})


@dataclass(frozen=True)
class Step:
    """A step to time: requests with new tokens each, at the end of a context."""

    num_reqs: int
    query_len: int
    context_len: int

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return self.num_reqs * self.query_len


def steps(device: torch.device, part: Slice) -> list[Step]:
    """Decode of 1, 8 and 64 requests, and a prompt."""
    if device.type == "cpu":
        return [Step(1, 1, 512), Step(1, 256, 256)]
    if part.contexts:
        return [Step(1, count, length) for length in part.contexts for count in (1, 64)]
    long = 131072
    if not part.is_whole:
        return [Step(1, 1, 8192), Step(8, 1, 8192), Step(64, 1, 8192), Step(1, 1, long)]
    decode = [Step(count, 1, length) for length in (8192, long) for count in (1, 8, 64)]
    return [*decode, Step(1, 4096, 4096)]


def make_pools(
    groups: Sequence[CacheGroup], step: Step, device: torch.device, block_size: int = BLOCK
) -> tuple[list[CachePool], Tensor]:
    """Random pools, and block tables: a sliding group uses two blocks of a request again."""
    columns = -(-step.context_len // block_size)
    pools, tables = [], torch.zeros(len(groups), step.num_reqs, columns, dtype=torch.int32)
    for index, group in enumerate(groups):
        each = min(2, columns) if group.spec.policy == "sliding" else columns
        pools.append(CachePool(group, 1 + step.num_reqs * each, block_size, str(device)))
        first = 1 + each * torch.arange(step.num_reqs).unsqueeze(1)
        tables[index] = first + torch.arange(columns) % each
    for pool in pools:
        for planes in pool.layers.values():
            for name, plane in planes.items():
                if plane.dtype != torch.uint8:
                    plane.normal_()
                elif name.endswith("scales"):
                    plane.fill_(120)
                else:
                    plane.random_(0, 64)
    return pools, tables.to(device)


def floor_bytes(
    model: DeepseekV4, weights: RandomWeights, step: Step, num_routed: int | None = None
) -> int:
    """The least bytes that a step moves; see the module.

    num_routed: tokens that choose experts; None: those of the step.
    """
    config, num_routed = model.config, num_routed or step.num_tokens
    share = config.num_experts_per_tok / config.num_experts
    chosen = 1 - (1 - share) ** num_routed
    total = 0.0
    for name, size in weights.num_bytes.items():
        if "ffn.experts." in name:
            total += size * chosen
        elif name not in ("embed.weight", "head.weight"):
            total += size
    entry, key = entry_bytes(config, "fp8")
    for ratio in config.compress_ratios[: config.num_layers]:
        # New tokens of a prompt share its vectors: each is read once.
        seen = step.num_tokens if step.query_len > 1 else step.num_reqs * config.sliding_window
        total += seen * entry
        if ratio:
            visible = step.num_reqs * (step.context_len // ratio)
            is_csa = ratio == CSA_RATIO
            total += visible * key if is_csa else 0
            most = step.num_tokens * config.index_topk if is_csa else visible
            total += min(visible, most) * entry
        item = model.state_dtype.itemsize
        total += 4 * step.num_tokens * config.num_streams * config.hidden_size * item
    return int(total)


def floor_flops(model: DeepseekV4, step: Step) -> int:
    """Operations of the matrix products and of attention."""
    config = model.config
    flops = 2 * step.num_tokens * model.weights_per_layer * config.num_layers
    for ratio in config.compress_ratios[: config.num_layers]:
        keys = config.sliding_window
        entries = step.context_len // ratio if ratio else 0
        if ratio == CSA_RATIO:
            width = config.index_num_heads * config.index_head_dim
            flops += 2 * step.num_tokens * entries * width
            entries = min(entries, config.index_topk)
        flops += 4 * step.num_tokens * (keys + entries) * config.num_heads * config.head_dim
    return flops


def measure_workspace(model: DeepseekV4, batch: Batch) -> tuple[Tensor, int]:
    """The states of a step, and the bytes that it allocates at its peak; 0 on a CPU."""
    device = batch.rows.device
    if device.type == "cpu":
        return model.forward(batch), 0
    model.forward(batch)  # loads kernels and libraries
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = model.forward(batch)
    return out, torch.cuda.max_memory_allocated(device) - before


def time_step(call: Callable[[], object], step: Step, device: torch.device) -> list[float]:
    """Microseconds; a decode step on a GPU is replayed from a graph."""
    if device.type == "cuda" and step.query_len == 1:
        return graph_us([call], SECONDS)
    return times_us([call], device, SECONDS)


def measure(
    part: Slice, device: torch.device, ceilings: tuple[float, float]
) -> list[dict[str, Any]]:
    """Time all steps of a slice."""
    config = part.config(device)
    weights = RandomWeights(config, device, part.experts)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    reader = cast("WeightReader", weights)
    model = DeepseekV4(config, reader, dtype, 1 << 20, ModelOptions(kv_dtype="fp8"))
    groups, rows = group_specs(model.cache_specs()), []
    for step in steps(device, part):
        pools, tables = make_pools(groups, step, device)
        model.bind_cache(pools)
        batch = make_timing_batch(step.num_reqs, step.query_len, step.context_len, tables)
        ids = torch.randint(0, config.vocab_size, batch.input_ids.shape, device=device)
        batch = replace(batch, input_ids=ids.int())
        rows.append(_row(part, model, weights, (step, batch), ceilings))
        print(rows[-1], flush=True)
        del pools, batch
        gc.collect()
    return rows


@torch.inference_mode()
def _row(
    part: Slice,
    model: DeepseekV4,
    weights: RandomWeights,
    timed: tuple[Step, Batch],
    ceilings: tuple[float, float],
) -> dict[str, Any]:
    step, batch = timed
    device = batch.rows.device
    out, workspace_bytes = measure_workspace(model, batch)
    if not bool(out.isfinite().all()):
        raise SystemExit(f"{part.name}: the states are not finite; not timed")
    samples = time_step(lambda: model.forward(batch), step, device)
    median_us = statistics.median(samples)
    num_bytes, flops = floor_bytes(model, weights, step), floor_flops(model, step)
    memory_us, compute_us = num_bytes / ceilings[0] / 1e3, flops / ceilings[1] / 1e6
    floor_us = max(memory_us, compute_us)
    return {
        "name": f"{part.name}: {step.num_reqs} requests, {step.query_len} new tokens, context "
        f"{step.context_len}",
        "experts": part.experts.name,
        "is_graph": device.type == "cuda" and step.query_len == 1,
        "median_us": round(median_us, 1),
        "samples": len(samples),
        "workspace_bytes": workspace_bytes,
        "weight_bytes": sum(weights.num_bytes.values()),
        "bytes": num_bytes,
        "flops": flops,
        "floor_us": round(floor_us, 2),
        "fraction_of_floor": round(floor_us / median_us, 6),
    }


def main() -> None:
    """Run the slices whose names contain a text."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="part of a slice's name")
    parser.add_argument("--skip", default="no such slice", help="part of a slice's name")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    ceilings = read_gbps(device), matrix_tflops(torch.bfloat16, device)
    names = ("read_gbps", "bfloat16_tflops")
    rows: list[dict[str, Any]] = [
        {"name": "ceilings of the device", **dict(zip(names, ceilings, strict=True))}
    ]
    for part in slices():
        if arguments.only in part.name and arguments.skip not in part.name:
            rows += measure(part, device, ceilings)
            save(arguments.out, environment(device), rows)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
