"""Writes a GGUF file of a real model's shapes and types with random weights, to measure speed.

    python -m benchmarks.synthetic_model qwen3-8b qwen3-8b.gguf

Types are those of a Q4_K_M file: Q4_K, with Q6_K for half of attn_v and ffn_down and for the output
matrix (the embedding, where that is the output matrix too), float32 norms and biases. Weights are
random codes under scales that keep activations near 1. The tokenizer is 256 byte tokens and made-up
words. It needs the `gguf` package (extra `dev`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

BLOCK = 256  # weights of a block of Q4_K and Q6_K
CODES = 64 << 20  # bytes of random codes, which are reused


@dataclass(frozen=True)
class Shape:
    """A model's architecture and sizes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int = 151_936
    context: int = 40_960
    arch: str = "qwen3"  # qwen2: biases of q, k and v; gemma3: norms around attention and MLP
    tied: bool = False  # the embedding is also the output matrix
    window: int = 0  # of gemma3's sliding layers, five of six


SHAPES = {
    "qwen3-0.6b": Shape(1024, 28, 16, 8, 128, 3072, tied=True),
    "qwen3-1.7b": Shape(2048, 28, 16, 8, 128, 6144, tied=True),
    "qwen3-4b": Shape(2560, 36, 32, 8, 128, 9728, tied=True),
    "qwen3-8b": Shape(4096, 36, 32, 8, 128, 12288),
    "qwen3-14b": Shape(5120, 40, 40, 8, 128, 17408),
    "qwen3-32b": Shape(5120, 64, 64, 8, 128, 25600),
    "qwen2.5-7b": Shape(3584, 28, 28, 4, 128, 18944, 152_064, 32_768, "qwen2"),
    "llama3-1b": Shape(2048, 16, 32, 8, 64, 8192, 128_256, 131_072, "llama", tied=True),
    "llama3-3b": Shape(3072, 28, 24, 8, 128, 8192, 128_256, 131_072, "llama", tied=True),
    "llama3-8b": Shape(4096, 32, 32, 8, 128, 14336, 128_256, 131_072, "llama"),
    "llama3-70b": Shape(8192, 80, 64, 8, 128, 28672, 128_256, 131_072, "llama"),
    "gemma3-4b": Shape(2560, 34, 8, 4, 256, 10240, 262_144, 131_072, "gemma3", True, 1024),
    "gemma3-12b": Shape(3840, 48, 16, 8, 256, 15360, 262_144, 131_072, "gemma3", True, 1024),
    "gemma3-27b": Shape(5376, 62, 32, 16, 128, 21504, 262_144, 131_072, "gemma3", True, 1024),
}


def has_more_bits(layer: int, layers: int) -> bool:
    """Whether attn_v and ffn_down of this layer are Q6_K in a Q4_K_M file."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


class Weights:
    """Random blocks of a type."""

    def __init__(self, seed: int) -> None:
        self._codes = np.random.default_rng(seed).integers(0, 256, CODES, dtype=np.uint8)
        self._at = 0

    def tensor(
        self, kind: gguf.GGMLQuantizationType, out: int, inner: int
    ) -> npt.NDArray[np.uint8]:
        """(out, row bytes) of blocks whose weights have a spread of about 1 / sqrt(inner)."""
        size = gguf.GGML_QUANT_SIZES[kind][1]
        count = out * inner // BLOCK
        start = self._at % (CODES // 2)
        self._at += 997
        data = np.resize(self._codes[start:], count * size).reshape(count, size)
        spread = 1.0 / np.sqrt(inner)
        if kind == gguf.GGMLQuantizationType.Q4_K:  # codes of 0 to 15 under scales of 0 to 63
            pair = np.array([spread / 150, spread / 20], np.float16).view(np.uint8)
            data[:, :4] = pair
        else:  # Q6_K: codes of -32 to 31 under scales of -128 to 127, d last
            data[:, -2:] = np.array([spread / 1300], np.float16).view(np.uint8)
        return data.reshape(out, -1)


def write(model: str, path: Path, seed: int = 0) -> None:
    """Write one model."""
    shape, weights = SHAPES[model], Weights(seed)
    q4_k, q6_k = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K
    writer = gguf.GGUFWriter(path, shape.arch)
    write_metadata(writer, model, shape)

    def matrix(tensor: str, kind: gguf.GGMLQuantizationType, out: int, inner: int) -> None:
        writer.add_tensor(f"{tensor}.weight", weights.tensor(kind, out, inner), raw_dtype=kind)

    def norm(tensor: str, size: int) -> None:
        writer.add_tensor(f"{tensor}.weight", np.ones(size, np.float32))

    matrix("token_embd", q6_k if shape.tied else q4_k, shape.vocab, shape.hidden)
    if not shape.tied:
        matrix("output", q6_k, shape.vocab, shape.hidden)
    norm("output_norm", shape.hidden)
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        better = q6_k if has_more_bits(layer, shape.layers) else q4_k
        norm(f"{block}.attn_norm", shape.hidden)
        norm(f"{block}.ffn_norm", shape.hidden)
        if shape.arch in ("qwen3", "gemma3"):
            norm(f"{block}.attn_q_norm", shape.head_dim)
            norm(f"{block}.attn_k_norm", shape.head_dim)
        if shape.arch == "gemma3":
            norm(f"{block}.post_attention_norm", shape.hidden)
            norm(f"{block}.post_ffw_norm", shape.hidden)
        if shape.arch == "qwen2":
            for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
                writer.add_tensor(f"{block}.attn_{name}.bias", np.zeros(size, np.float32))
        matrix(f"{block}.attn_q", q4_k, q_size, shape.hidden)
        matrix(f"{block}.attn_k", q4_k, kv_size, shape.hidden)
        matrix(f"{block}.attn_v", better, kv_size, shape.hidden)
        matrix(f"{block}.attn_output", q4_k, shape.hidden, q_size)
        matrix(f"{block}.ffn_gate", q4_k, shape.intermediate, shape.hidden)
        matrix(f"{block}.ffn_up", q4_k, shape.intermediate, shape.hidden)
        matrix(f"{block}.ffn_down", better, shape.hidden, shape.intermediate)
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
    options = parser.parse_args()
    write(options.name, options.path, options.seed)
