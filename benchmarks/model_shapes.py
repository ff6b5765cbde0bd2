"""Sizes of published dense models, and the types of a Q4_K_M file."""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.kernels.fused.fused_decode_step_geometry import DecoderShape


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
    mixture: str = "Q4_K_M"  # or Q4_0


SHAPES = {
    "qwen3-0.6b": Shape(1024, 28, 16, 8, 128, 3072, tied=True),
    "qwen3-1.7b": Shape(2048, 28, 16, 8, 128, 6144, tied=True),
    "qwen3-4b": Shape(2560, 36, 32, 8, 128, 9728, tied=True),
    "qwen3-8b": Shape(4096, 36, 32, 8, 128, 12288),
    "qwen3-14b": Shape(5120, 40, 40, 8, 128, 17408),
    "qwen3-32b": Shape(5120, 64, 64, 8, 128, 25600),
    "qwen2.5-0.5b": Shape(896, 24, 14, 2, 64, 4864, 151_936, 32_768, "qwen2", tied=True),
    "qwen2.5-1.5b": Shape(1536, 28, 12, 2, 128, 8960, 151_936, 32_768, "qwen2", tied=True),
    "qwen2.5-7b": Shape(3584, 28, 28, 4, 128, 18944, 152_064, 32_768, "qwen2"),
    "smollm2-135m": Shape(
        *(576, 30, 9, 3, 64, 1536, 49_152, 8192), arch="llama", tied=True, mixture="Q4_1"
    ),
    "llama3-1b": Shape(2048, 16, 32, 8, 64, 8192, 128_256, 131_072, "llama", tied=True),
    "llama3-3b": Shape(3072, 28, 24, 8, 128, 8192, 128_256, 131_072, "llama", tied=True),
    "llama3-8b": Shape(4096, 32, 32, 8, 128, 14336, 128_256, 131_072, "llama"),
    "llama3-70b": Shape(8192, 80, 64, 8, 128, 28672, 128_256, 131_072, "llama"),
    "gemma3-270m": Shape(640, 18, 4, 1, 256, 2048, 262_144, 32_768, "gemma3", True, 512, "Q4_0"),
    "gemma3-1b": Shape(1152, 26, 4, 1, 256, 6912, 262_144, 32_768, "gemma3", True, 512),
    "gemma3-4b": Shape(2560, 34, 8, 4, 256, 10240, 262_144, 131_072, "gemma3", True, 1024),
    "gemma3-12b": Shape(3840, 48, 16, 8, 256, 15360, 262_144, 131_072, "gemma3", True, 1024),
    "gemma3-27b": Shape(5376, 62, 32, 16, 128, 21504, 262_144, 131_072, "gemma3", True, 1024),
}


# Types of most matrices of a file, and of half of attn_v and ffn_down.
MIXTURES = {
    "Q4_K_M": ("Q4_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K"),
    "IQ4_XS": ("IQ4_XS", "Q5_K"),
    "Q8_0": ("Q8_0", "Q8_0"),
    "Q4_0": ("Q4_0", "Q4_0"),
}
# Instead of a type of blocks of 256 where a row is no multiple of 256 columns.
SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}


def step_types(name: str, mixture: str) -> list[tuple[str, ...]]:
    """Of each layer of one of SHAPES, the types of q, k, v, o, gate and up, down.

    Args:
        name: of SHAPES.
        mixture: of MIXTURES.
    """
    shape = SHAPES[name]
    usual, better = MIXTURES[mixture]
    columns = (*(shape.hidden,) * 3, shape.heads * shape.head_dim, shape.hidden, shape.intermediate)
    layers = []
    for layer in range(shape.layers):
        best = better if has_more_bits(layer, shape.layers) else usual
        wanted = (usual, usual, best, usual, usual, best)
        layers.append(
            tuple(
                SMALLER_BLOCKS.get(kind, kind) if wide % 256 else kind
                for kind, wide in zip(wanted, columns, strict=True)
            )
        )
    return layers


def decoder_shape(name: str, num_layers: int = 0) -> DecoderShape:
    """One of SHAPES as the kernel of whole decode steps sees it, all of its layers or some."""
    shape = SHAPES[name]
    is_gemma, layers = shape.arch == "gemma3", num_layers or shape.layers
    return DecoderShape(
        layers,
        shape.hidden,
        shape.intermediate,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.head_dim,
        shape.context,
        activation="gelu_tanh" if is_gemma else "silu",
        has_update_norms=is_gemma,
        window=shape.window,
        sliding=tuple(bool(shape.window) and layer % 6 != 5 for layer in range(layers)),
    )


def has_more_bits(layer: int, layers: int) -> bool:
    """Whether attn_v and ffn_down of this layer are Q6_K in a Q4_K_M file."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
