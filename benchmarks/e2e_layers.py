"""Dense layers of some dozens of requests, checked and timed with each toggle of their launches.

    python -m benchmarks.e2e_layers --out layers.json

Decode steps of a model of true shapes with random weights (`random_decoder.py`), as one CUDA graph,
without head and sampling. Each way is loaded by itself. A few layers are compared with the oracle
in float64 first, in residuals of which every fourth has a massive activation, as those of trained
models have; a way whose results are wrong is not timed, and the others go on. Microseconds are
those of a layer: the difference of two numbers of layers would halve the precision, so the
embedding and the last addition, about 8 us of a step, are divided among them.

Floor: weights and keys read once at the measured rate.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.common import environment
from benchmarks.deepseek_v4_layers import Step, make_pools
from benchmarks.figures import save
from benchmarks.model_shapes import SHAPES
from benchmarks.random_decoder import RandomDecoder, decoder_config
from tiercel.batch import Batch
from tiercel.cache.spec import group_specs
from tiercel.config import ModelOptions
from tiercel.models.decoder import Decoder
from tiercel.models.sharding import Sharding
from tiercel.models.weights import WeightReader
from tiercel.ops.dequantize import dequantize
from tiercel.profiling.device_timing import graph_us, read_gbps
from tiercel.quant import QuantTensor
from tiercel.reference.decoder_layers import decoder_layers
from tiercel.runner.step_inputs import make_timing_batch

NORMS, HEADS = {"TIERCEL_FUSED_GEMM_NORM": "1"}, {"TIERCEL_FUSED_GEMM_HEADS": "1"}
IMAGE = {"TIERCEL_ATTENTION_IMAGE": "1"}
WAYS = {
    "default": {},
    "norms": NORMS,
    "heads": HEADS,
    "image": IMAGE,
    "norms, image": NORMS | IMAGE,
    "all": NORMS | HEADS | IMAGE,
    **{
        f"all, {size} MB of keys": NORMS | HEADS | IMAGE | {"TIERCEL_PREFETCH_KEYS": str(size)}
        for size in (8, 16, 24, 36)
    },
}
# Kernels for fewer rows, whose weights need not be loaded.
OFF = {"TIERCEL_MEGAKERNEL": "0", "TIERCEL_DECODE_CHAIN": "0"}
TOKENS = (17, 32, 48, 64, 96)
LAYERS, CHECKED_LAYERS, CHECKED_REQUESTS = 12, 3, (0, 1, 6)
MASSIVE, CHANNEL = 1e4, 7
TOLERANCE = 1e-2  # of a row's residual less the massive activation; float16 products and cache
BOUND = 8192  # of lengths, as a graph knows them
POSITIONS = 1 << 14
SECONDS = 0.3
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


class Kept(RandomDecoder):
    """Weights that stay where the oracle finds them."""

    def __init__(self, *inputs: Any) -> None:
        super().__init__(*inputs)
        self.matrices: dict[str, QuantTensor] = {}

    def file_tensor(self, name: str) -> QuantTensor:
        """The drawn matrix, which is kept too."""
        self.matrices[name] = drawn = super().file_tensor(name)
        return drawn


@contextmanager
def switched(toggles: dict[str, str]) -> Iterator[None]:
    """Toggles while a model is loaded."""
    os.environ.update(toggles | OFF)
    try:
        yield
    finally:
        for name in toggles | OFF:
            del os.environ[name]


class Loaded:
    """A decoder with its weights and a batch over a random cache."""

    def __init__(self, model: str, num_layers: int, shrink: int, device: torch.device) -> None:
        self.config = decoder_config(model, num_layers, shrink)
        self.weights = Kept(self.config, device, Sharding())
        dtype = torch.float32 if device.type == "cpu" else torch.float16
        reader = cast("WeightReader", self.weights)
        self.decoder = Decoder(self.config, reader, dtype, POSITIONS, ModelOptions())
        self.device = device

    def bind(self, tokens: int, context: int) -> Batch:
        """A step of so many requests, whose new keys go to the ends of their contexts."""
        decoder = self.decoder
        size, step = decoder.block_size, Step(tokens, 1, context)
        groups = group_specs(decoder.cache_specs())
        self.pools, tables = make_pools(groups, step, self.device, size)
        decoder.bind_cache(self.pools)
        batch = make_timing_batch(tokens, 1, context, tables)
        place = context - 1
        slots = tables[:, :, place // size].long() * size + place % size
        ids = torch.arange(tokens, dtype=torch.int32, device=self.device) * 131
        return replace(
            batch,
            input_ids=ids % self.config.vocab_size,
            slot_mapping=slots,
            max_seq_len=max(BOUND, context),
        )

    def layer(self, index: int) -> dict[str, Tensor]:
        """Weights of a layer as the oracle takes them."""
        prefix = f"layers.{index}"
        found = {
            name: dequantize(self.weights.matrices[f"{prefix}.{name}.weight"], torch.float32)
            for name in MATRICES
        }
        norms = ("attn_norm", "mlp_norm", *(("q_norm", "k_norm") if self.config.qk_norm else ()))
        found |= {name: self.weights.vector(f"{prefix}.{name}.weight") for name in norms}
        zero = torch.zeros(1, device=self.device)
        return found | {"qkv_bias": zero, "o_bias": zero}

    def expect(self, x: Tensor, request: int, context: int) -> Tensor:
        """The oracle's residual of one request, (1, hidden) float64."""
        layers = []
        size = self.decoder.block_size
        for index, layer in enumerate(self.decoder.layers):
            columns = -(-context // size)
            first = 1 + request * columns
            planes = self.pools[layer.attention.group].layers[index]
            past = {
                name: planes[plane][first : first + columns].flatten(0, 1)[: context - 1]
                for name, plane in (("keys", "k"), ("values", "v"))
            }
            layers.append(self.layer(index) | past)
        turns = [layer.attention.rope_table[context - 1 : context] for layer in self.decoder.layers]
        seen = [torch.ones(1, context, dtype=torch.bool, device=self.device) for _ in layers]
        config = self.config
        return decoder_layers(
            x[request : request + 1],
            layers,
            turns,
            seen,
            config.norm_eps,
            config.attention_scale,
            activation=config.activation,
            cache_dtype=self.decoder.dtype,
        )


def error_of(loaded: Loaded, tokens: int, context: int) -> float:
    """The largest relative error of a checked request's residual, massive activations aside."""
    batch, decoder = loaded.bind(tokens, context), loaded.decoder
    embedding = decoder.embedding

    def embed(ids: Tensor) -> Tensor:
        x = embedding(ids)
        x[1::4, CHANNEL] = MASSIVE
        return x

    x = embed(batch.input_ids).clone()
    decoder.embedding = cast("Any", embed)
    found = decoder.forward(batch)
    decoder.embedding = embedding
    errors = []
    for request in CHECKED_REQUESTS:
        expected = loaded.expect(x, request, context)[0]
        difference = found[request].double() - expected
        difference[CHANNEL] = expected[CHANNEL] = 0.0
        errors.append(float(difference.norm() / expected.norm()))
    return max(error if error == error else float("inf") for error in errors)


def floor_us(loaded: Loaded, tokens: int, context: int, gbps: float) -> float:
    """Of a layer: its weights and the keys and values of all requests, read once."""
    matrices = loaded.weights.num_bytes.items()
    weights = sum(size for name, size in matrices if name.startswith("layers."))
    entry = sum(spec.entry_bytes for spec in loaded.decoder.cache_specs())
    return (weights + tokens * context * entry) / loaded.config.num_layers / gbps / 1e3


def measure(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each way and number of requests."""
    gbps = read_gbps(device) if device.type == "cuda" else 1.0
    for way in options.ways:
        with switched(WAYS[way]):
            checked = Loaded(options.model, CHECKED_LAYERS, options.shrink, device)
            errors = {tokens: error_of(checked, tokens, options.context) for tokens in TOKENS}
            del checked
            right = [tokens for tokens in TOKENS if errors[tokens] <= TOLERANCE]
            loaded = Loaded(options.model, options.layers, options.shrink, device)
        for tokens in TOKENS:
            row = {"way": way, "tokens": tokens, "context": options.context}
            row["error"] = errors[tokens]
            if tokens in right and device.type == "cuda":
                batch = loaded.bind(tokens, options.context)
                samples = graph_us([partial(loaded.decoder.forward, batch)], SECONDS)
                row["layer_us"] = statistics.median(samples) / options.layers
                row["floor_us"] = floor_us(loaded, tokens, options.context, gbps)
            yield row
        del loaded
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    """Check and time one model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--context", type=int, default=576)
    parser.add_argument("--shrink", type=int, default=1, help="divides widths, for tests")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, rows = torch.device(options.device), []
    for row in measure(options, device):
        rows.append({"model": options.model, "layers": options.layers} | row)
        save(options.out, environment(device), rows)
        print({key: value for key, value in row.items() if key != "context"}, flush=True)
    if not all(row["error"] <= TOLERANCE for row in rows):
        raise SystemExit(f"e2e_layers: an error exceeds {TOLERANCE:.0e}.")


if __name__ == "__main__":
    main()
