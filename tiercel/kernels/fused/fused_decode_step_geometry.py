"""Which decoders the kernel of a whole decode step is built for.

Its sizes are those of Qwen3-8B and Llama-3-8B. The number of layers, the width of the MLP and the
types of the matrices (Q4_K or Q6_K) may differ. Free of PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiercel.kernels.fused.fused_refusal import Refusal

HIDDEN, HEAD, KV_HEADS, HEADS = 4096, 128, 8, 4  # HEADS: query heads of a key/value head
GROUPS = 4  # of warps in a CTA
COLUMNS = 4096  # of a unit of weights, and of a slice of down
BLOCK = 256  # weights of a block of a file
TILE_KEYS, BLOCK_TOKENS = 32, 64
SPLITS, MOST_TILES = 16, 64  # of a key/value head; of a group of warps
MOST_TOKENS = TILE_KEYS * SPLITS * GROUPS * MOST_TILES  # of a context
MOST_SLICES = 4  # of 4096 columns in a row of down
MOST_LAYERS = 96  # whose tensor maps and addresses still fit a kernel's parameters
MATRICES = ("q", "k", "v", "o", "gate_up", "down")  # bits of a layer's mask of Q6_K
TYPES = ("Q4_K", "Q6_K")  # by the bit of a matrix in a mask
_LEAST_FILLED = 7 / 8  # of the slices: reading zeros takes as long as reading weights


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a decoder, which decide whether the kernel fits it.

    Attributes:
        num_layers: of the decoder.
        hidden_size: of the residual.
        intermediate_size: of the MLP.
        num_heads: of queries.
        num_kv_heads: of keys and values.
        head_dim: elements of a head.
        rotary_dim: elements of a head that rotate.
        max_tokens: of a context.
        unsupported: a part that the kernel lacks, such as a bias; empty if there is none.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    max_tokens: int
    unsupported: str = ""

    @property
    def slices(self) -> int:
        """Slices of 4096 columns in a row of down; the last one may be filled up with zeros."""
        return -(-self.intermediate_size // COLUMNS)


@dataclass(frozen=True, slots=True)
class StepGeometry:
    """Parameters of the kernel and its packed weights.

    Attributes:
        masks: of each layer; bit i is set if matrix i of `MATRICES` is Q6_K, else it is Q4_K.
        slices: of 4096 columns in a row of down.
    """

    masks: tuple[int, ...]
    slices: int


def refuse_shape(shape: DecoderShape) -> Refusal | None:
    """Why a decoder's sizes do not fit the kernel; None if they do. Pure."""
    wanted = {
        "hidden_size": (shape.hidden_size, HIDDEN),
        "num_heads": (shape.num_heads, HEADS * KV_HEADS),
        "num_kv_heads": (shape.num_kv_heads, KV_HEADS),
        "head_dim": (shape.head_dim, HEAD),
        "rotary_dim": (shape.rotary_dim, HEAD),
    }
    for name, (value, fitting) in wanted.items():
        if value != fitting:
            return Refusal(f"{name} is {value}; the kernel is built for {fitting}")
    return _refuse_width(shape.intermediate_size, shape.slices) or _refuse_rest(shape)


def _refuse_width(inner: int, slices: int) -> Refusal | None:
    if inner % BLOCK:
        return Refusal(f"intermediate_size is {inner}, not a multiple of {BLOCK}")
    if slices > MOST_SLICES:
        return Refusal(f"intermediate_size is {inner}; at most {MOST_SLICES * COLUMNS} fits")
    if inner / (slices * COLUMNS) < _LEAST_FILLED:
        return Refusal(
            f"intermediate_size is {inner}; it must fill 7/8 of {slices * COLUMNS} columns"
        )
    return None


def _refuse_rest(shape: DecoderShape) -> Refusal | None:
    if shape.num_layers > MOST_LAYERS:
        return Refusal(f"num_layers is {shape.num_layers}; at most {MOST_LAYERS} fit")
    if shape.max_tokens > MOST_TOKENS:
        return Refusal(f"contexts have up to {shape.max_tokens} tokens; at most {MOST_TOKENS} fit")
    return Refusal(shape.unsupported) if shape.unsupported else None


def partition(
    shape: DecoderShape, layers: Sequence[Mapping[str, Sequence[str]]]
) -> StepGeometry | Refusal:
    """Fit a decoder to the kernel. Pure: equal in every process, readable by a test.

    Args:
        shape: of the decoder.
        layers: of each, the types of each of `MATRICES`: of gate and up, else of one.
    """
    refusal = refuse_shape(shape)
    if refusal is not None:
        return refusal
    masks = []
    for index, layer in enumerate(layers):
        for name in MATRICES:
            kinds = list(dict.fromkeys(layer[name]))
            unknown = [kind for kind in kinds if kind not in TYPES]
            if unknown:
                return Refusal(
                    f"{name} of layer {index} is {unknown[0]}; the kernel reads {TYPES[0]} and "
                    f"{TYPES[1]}"
                )
            if len(kinds) > 1:
                return Refusal(f"{name} of layer {index} is of two types, {' and '.join(kinds)}")
        masks.append(sum(int(layer[name][0] == TYPES[1]) << i for i, name in enumerate(MATRICES)))
    return StepGeometry(tuple(masks), shape.slices)
