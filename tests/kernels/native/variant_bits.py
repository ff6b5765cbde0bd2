"""Digests of what a variant computes, to compare machines: fused variants have the same bits.

    python -m tests.kernels.native.variant_bits neon OUT.json

Inputs are integers times powers of two, so that they are equal wherever this runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.decoder_layers_model import Made, Model, make_batch, make_tables
from tests.kernels.native import test_floats, test_products
from tests.kernels.native.attention_cases import Part, Shape, fill_cache, make_step, run_step
from tests.kernels.native.test_rows import norm_rows
from tests.ops.test_dequantize import random_blocks
from tiercel.kernels.native import abi
from tiercel.kernels.native.library import NativeLibrary, load_variant, make_pool

TOKENS = (1, 5, 19)
COLS = 512
SHAPES = (
    Shape(has_norm=True),
    Shape(dtype=torch.float32, block_size=7, window=70),
    Shape(dtype=torch.bfloat16, num_heads=4, num_kv_heads=1, head_dim=80, half=16),
    Shape(num_heads=6, num_kv_heads=2, head_dim=21, half=10),
)
MODELS = {
    "K types": Model(
        types="Q4_K Q4_K Q6_K Q4_K Q4_K Q4_K Q6_K", hidden=256, inner=512, heads=8, kv_heads=4,
        extras=("q_norm", "k_norm", "qkv_bias", "o_bias"),
    ),
    "windows": Model(windows=(20, 0), activation="gelu_tanh", half=12, head_dim=48, heads=2,
        kv_heads=1, types="Q5_1 Q5_0 Q4_0 IQ4_NL Q8_0 Q8_0 Q4_0",
        extras=("attn_update_norm", "mlp_update_norm"),
    ),
    "float32": Model(cache=torch.float32, rounds=False),
}  # fmt: skip


def exact(shape: tuple[int, ...], seed: int) -> Tensor:
    """Float32 of both signs and different sizes, equal on all machines."""
    rng = np.random.default_rng(seed)
    values = np.ldexp(rng.integers(-(1 << 20), 1 << 20, shape), rng.integers(-22, -18, shape))
    return torch.from_numpy(values.astype(np.float32))


def digest(values: Tensor | np.ndarray) -> str:
    """Digest of bytes or of finite numbers."""
    array = values.numpy() if isinstance(values, Tensor) else values
    assert np.isfinite(array).all()
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def products(native: NativeLibrary) -> dict[str, str]:
    """Of each type in the file's layout and in tiles, with activations of 32, 8 and 15 bits."""
    found = {}
    for place, name in enumerate(test_floats.TYPES):
        flat = random_blocks(name, 37, COLS // test_floats.QuantType[name].block_weights, place)
        if name == "MXFP4":  # sums that overflow would be NaN, whose sign is the processor's
            flat[..., 0] = 118 + flat[..., 0] % 8
        flat = np.ascontiguousarray(flat.reshape(37, -1))
        matrices = {"file": test_floats.Matrix(name, flat, COLS).weight}
        if name in test_products.TYPES:
            matrices["tiles"] = test_products.pack(native, flat, name)
        for layout, weight in matrices.items():
            for parts in (0, 1, 2):
                y = [linear(native, weight, exact((n, COLS), n), parts) for n in TOKENS]
                found[f"{name} {layout}, parts {parts}"] = digest(np.concatenate(y))
        found[f"{name} as floats"] = digest(test_floats.dequantize(native, matrices["file"]))
    return found


def linear(native: NativeLibrary, weight: abi.Weight, x: Tensor, parts: int) -> np.ndarray:
    lib, (rows, cols) = native.lib, x.shape
    scratch = np.zeros(lib.tc_linear_scratch(rows, cols, weight.rows, parts), np.uint8)
    y = np.full((rows, weight.rows), np.nan, np.float32)
    lib.tc_linear(
        make_pool(2, native).handle, weight, 1, x.data_ptr(), rows, parts,
        scratch.ctypes.data, y.ctypes.data,
    )  # fmt: skip
    return y


def rows(native: NativeLibrary) -> dict[str, str]:
    """Norms and activations."""
    found = {}
    for cols in (5, 100, 576):
        x, update, weight, norm = (exact((7, cols), seed) for seed in range(4))
        out = norm_rows(native.variant, x, weight[0], update, norm[0])
        found[f"norm of {cols}"] = digest(torch.cat((x, out)))
        for activation in (0, 1):
            pair, out = exact((7, 2 * cols), 9), torch.full((7, cols), torch.nan)
            native.lib.tc_act_mul_rows(
                make_pool(2, native).handle, pair.data_ptr(), activation, 7, cols, out.data_ptr()
            )
            found[f"activation {activation} of {cols}"] = digest(out)
    return found


def attention(native: NativeLibrary) -> dict[str, str]:
    """Prompts and decoding, and what they write to the cache."""
    found = {}
    for shape in SHAPES:
        heads = shape.num_heads + 2 * shape.num_kv_heads
        for kind, new in (("prompt", 90), ("decode", 3)):
            lengths = (new, new + 300, new + 64)
            parts = [Part(exact((n, heads, shape.head_dim), n), n - new) for n in lengths]
            step = make_step(replace(shape, has_norm=False), parts)
            kv = (shape.num_kv_heads, shape.head_dim)
            fill_cache(
                step, parts, [(exact((n, *kv), n + 1), exact((n, *kv), n + 2)) for n in lengths]
            )
            step.rope = exact(tuple(step.rope.shape), 4)
            if shape.has_norm:
                step.norms = exact((shape.head_dim,), 5), exact((shape.head_dim,), 6)
            out = run_step(step, native.variant)
            found[f"{kind}, {shape}"] = digest(out)
            for name, cache in (("keys", step.k_cache), ("values", step.v_cache)):
                found[f"{name} of {kind}, {shape}"] = digest(cache.view(torch.uint8))
    return found


def layers() -> dict[str, str]:
    """Whole steps of the variant that ``TIERCEL_CPU`` forces."""
    found = {}
    for name, model in MODELS.items():
        made = Made(model)
        for place, rope in enumerate(made.ropes):
            rope.copy_(exact(tuple(rope.shape), place))
        lengths = (40, 1, 70)
        batch = make_batch(
            made, make_tables(made, lengths), [(i, 0, n) for i, n in enumerate(lengths)]
        )
        found[f"layers, {name}"] = digest(made.run(exact((sum(lengths), model.hidden), 8), batch))
    return found


def main() -> None:
    variant, path = sys.argv[1:]
    os.environ["TIERCEL_CPU"] = variant
    native = load_variant(variant)
    found = products(native) | rows(native) | attention(native) | layers()
    Path(path).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
