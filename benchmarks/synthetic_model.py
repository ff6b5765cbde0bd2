"""Writes a GGUF file of a real model's shapes and types with random weights, to measure speed.

    python -m benchmarks.synthetic_model qwen3-8b qwen3-8b.gguf
    python -m benchmarks.synthetic_model qwen3-0.6b two_layers.gguf --layers 2

Types are those of a published file. Of Q4_K_M: Q4_K, with Q6_K for half of attn_v and ffn_down and
for the output matrix (the embedding, where that is the output matrix too); Q5_0 and Q8_0 instead
where rows are not whole blocks of 256. Of Q4_0: Q4_0, and the output matrix as in Q4_K_M. Of Q4_1:
Q4_1, and Q8_0 for the output matrix. Norms and biases are float32. Weights are random codes under
scales that keep activations near 1. The tokenizer is 256 byte tokens and made-up words. It needs
the `gguf` package (extra `dev`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from benchmarks.model_shapes import SHAPES, SMALLER_BLOCKS, Shape, has_more_bits

Kind = gguf.GGMLQuantizationType
# Of types whose blocks begin with one float16 scale: the spread of their codes.
SPREADS = {Kind.Q4_0: 4.6, Kind.Q5_0: 9.2, Kind.Q8_0: 74.0}
# Of mixtures: the type of most matrices, of half of attn_v and ffn_down, of the output matrix.
MIXTURES = {
    "Q4_K_M": (Kind.Q4_K, Kind.Q6_K, Kind.Q6_K),
    "Q4_0": (Kind.Q4_0, Kind.Q4_0, Kind.Q6_K),
    "Q4_1": (Kind.Q4_1, Kind.Q4_1, Kind.Q8_0),
}
CODES = 64 << 20  # bytes of random codes, which are reused


class Matrix(NamedTuple):
    """Name, type and size of a matrix."""

    tensor: str
    kind: Kind
    out: int
    inner: int


def matrices(shape: Shape) -> Iterator[Matrix]:
    """Every matrix of a file, with its type in the file's mixture."""
    usual, better, output = MIXTURES[shape.mixture]

    def matrix(tensor: str, kind: Kind, out: int, inner: int) -> Matrix:
        if inner % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = Kind[SMALLER_BLOCKS[kind.name]]
        return Matrix(tensor, kind, out, inner)

    yield matrix("token_embd", output if shape.tied else usual, shape.vocab, shape.hidden)
    if not shape.tied:
        yield matrix("output", output, shape.vocab, shape.hidden)
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        best = better if has_more_bits(layer, shape.layers) else usual
        yield matrix(f"{block}.attn_q", usual, q_size, shape.hidden)
        yield matrix(f"{block}.attn_k", usual, kv_size, shape.hidden)
        yield matrix(f"{block}.attn_v", best, kv_size, shape.hidden)
        yield matrix(f"{block}.attn_output", usual, shape.hidden, q_size)
        yield matrix(f"{block}.ffn_gate", usual, shape.intermediate, shape.hidden)
        yield matrix(f"{block}.ffn_up", usual, shape.intermediate, shape.hidden)
        yield matrix(f"{block}.ffn_down", best, shape.hidden, shape.intermediate)


def vectors(shape: Shape) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Every norm and bias."""
    sizes = {"attn_norm": shape.hidden, "ffn_norm": shape.hidden}
    if shape.arch in ("qwen3", "gemma3"):
        sizes |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    if shape.arch == "gemma3":
        sizes |= {"post_attention_norm": shape.hidden, "post_ffw_norm": shape.hidden}
    yield "output_norm.weight", np.ones(shape.hidden, np.float32)
    for layer in range(shape.layers):
        for name, size in sizes.items():
            yield f"blk.{layer}.{name}.weight", np.ones(size, np.float32)
        if shape.arch == "qwen2":
            for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
                bias = np.zeros(heads * shape.head_dim, np.float32)
                yield f"blk.{layer}.attn_{name}.bias", bias


class Weights:
    """Random blocks of a type."""

    def __init__(self, seed: int) -> None:
        self._codes = np.random.default_rng(seed).integers(0, 256, CODES, dtype=np.uint8)
        self._at = 0

    def of(self, matrix: Matrix) -> npt.NDArray[np.uint8]:
        """(out, row bytes) of blocks whose weights have a spread of about 1 / sqrt(inner)."""
        _, kind, out, inner = matrix
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        count = out * inner // weights
        start = self._at % (CODES // 2)
        self._at += 997
        data = np.resize(self._codes[start:], count * size).reshape(count, size)
        spread = 1.0 / np.sqrt(inner)
        if kind == Kind.Q4_K:  # codes of 0 to 15 under scales of 0 to 63
            pair = np.array([spread / 150, spread / 20], np.float16).view(np.uint8)
            data[:, :4] = pair
        elif kind == Kind.Q4_1:  # codes of 0 to 15 around their middle
            pair = np.array([spread / 4.6, -7.5 * spread / 4.6], np.float16).view(np.uint8)
            data[:, :4] = pair
        elif kind == Kind.Q6_K:  # codes of -32 to 31 under scales of -128 to 127, d last
            data[:, -2:] = np.array([spread / 1300], np.float16).view(np.uint8)
        else:
            data[:, :2] = np.array([spread / SPREADS[kind]], np.float16).view(np.uint8)
        return data.reshape(out, -1)


def write(model: str, path: Path, seed: int = 0, layers: int = 0) -> None:
    """Write one model; layers: in place of all, if not 0."""
    shape, weights = SHAPES[model], Weights(seed)
    shape = replace(shape, layers=layers or shape.layers)
    writer = gguf.GGUFWriter(path, shape.arch)
    write_metadata(writer, model, shape)
    for name, values in vectors(shape):
        writer.add_tensor(name, values)
    for matrix in matrices(shape):
        data = weights.of(matrix)
        writer.add_tensor(f"{matrix.tensor}.weight", data, raw_dtype=matrix.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(writer: gguf.GGUFWriter, name: str, shape: Shape) -> None:
    """Write hyperparameters and a tokenizer of bytes."""
    writer.add_name(f"{name} with random weights")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    if shape.window:
        writer.add_sliding_window(shape.window)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    characters = {byte: chr(byte) for byte in shown}
    characters |= {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    tokens = [characters[byte] for byte in range(256)]
    # One merge, " t", since an empty list cannot be written.
    tokens += ["<|end|>", "\u0120t", *(f"w{i}" for i in range(258, shape.vocab))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] + [1] * (shape.vocab - 257))
    writer.add_token_merges(["\u0120 t"])
    writer.add_eos_token_id(256)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=0, help="0: all")
    options = parser.parse_args()
    write(options.name, options.path, options.seed, options.layers)
