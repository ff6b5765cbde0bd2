"""Layers of a dense decoder as the native library runs them: its structures, and their call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.kernels.native.abi import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Attention,
    Decoder,
    Layer,
    Step,
    Weight,
)
from tiercel.kernels.native.matrices import (
    NativeMatrix,
    current_pool,
    functions,
    weight_array,
)

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
CACHE_TYPES = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
# Fields of `tc_attention` that are those of `tc_decoder`, `tc_layer` and `tc_step`.
_OF_DECODER = (
    *("num_heads", "num_kv_heads", "head_dim", "half"),
    *("scale", "eps", "cache_type", "block_size"),
)
_OF_LAYER = ("window", "q_norm", "k_norm", "rope", "k_cache", "v_cache")
_OF_STEP = ("rows", "starts", "seq_lens", "positions", "prefix_len", "item_start")
FEW_TOKENS = 64  # of a step that is one call; layers of longer ones are called one by one


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The weights of a layer. Vectors are float32 and contiguous; None where there is none.

    Attributes:
        attn_norm: (hidden,), of the norm before attention.
        attn_update_norm: (hidden,), of the norm of the update that is added before it.
        mlp_norm: (hidden,), of the norm before the MLP.
        mlp_update_norm: (hidden,), of the norm of attention's update.
        qkv: matrices whose rows are q, k and v.
        output: matrices of attention's output.
        gate_up: gate, then up, each (intermediate, hidden).
        down: (hidden, intermediate).
        qkv_bias: (rows of qkv,).
        output_bias: (hidden,).
        head_norms: (head_dim,) of q and of k.
        rope: (positions, 2, half), cos and sin.
        window: keys that a query sees; 0 for all.
    """

    attn_norm: Tensor
    attn_update_norm: Tensor | None
    mlp_norm: Tensor
    mlp_update_norm: Tensor | None
    qkv: tuple[NativeMatrix, ...]
    output: tuple[NativeMatrix, ...]
    gate_up: tuple[NativeMatrix, ...]
    down: tuple[NativeMatrix, ...]
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    rope: Tensor
    window: int


@dataclass(frozen=True, slots=True)
class LayersShape:
    """What all layers share.

    Attributes:
        hidden_size: columns of the residual.
        intermediate_size: rows of gate and of up.
        num_heads: of queries.
        num_kv_heads: of keys and of values.
        head_dim: elements of a head.
        activation: of `ACTIVATIONS`.
        eps: of all norms.
        scale: multiplies the scores.
        rounds: whether inputs of products are rounded to 8 bits, in groups of 32.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    eps: float
    scale: float
    rounds: bool


class NativeLayers:
    """The structures of `tc_run_layers`, with all that they point to."""

    def __init__(
        self, parts: Sequence[LayerParts], shape: LayersShape, last_update_norm: Tensor | None
    ) -> None:
        self._parts = tuple(parts)
        self._last_update_norm = last_update_norm
        self._caches: Sequence[dict[str, Tensor]] = ()
        self._arrays: list[ctypes.Array[Weight]] = []
        self._layers = (Layer * len(parts))(*(self._layer(part) for part in parts))
        self._decoder = Decoder(
            layers=self._layers,
            num_layers=len(parts),
            hidden=shape.hidden_size,
            intermediate=shape.intermediate_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            half=parts[0].rope.shape[2],
            activation=ACTIVATIONS[shape.activation],
            rounds=shape.rounds,
            eps=shape.eps,
            scale=shape.scale,
            last_update_norm=_address(last_update_norm),
        )
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def bind_cache(self, caches: Sequence[dict[str, Tensor]], groups: Sequence[int]) -> None:
        """Take planes ``k`` and ``v`` of each layer, and the index of its block tables."""
        self._caches = caches
        first = caches[0]["k"]
        self._decoder.cache_type = CACHE_TYPES[first.dtype]
        self._decoder.block_size = first.shape[1]
        for layer, planes, group in zip(self._layers, caches, groups, strict=True):
            layer.k_cache, layer.v_cache = planes["k"].data_ptr(), planes["v"].data_ptr()
            layer.group = group

    def run(
        self,
        x: Tensor,
        tokens: dict[str, Tensor | None],
        num_reqs: int,
        pulse: Callable[[], None],
    ) -> None:
        """Pass tokens through all layers.

        Args:
            x: (T, hidden) float32 contiguous, mutated.
            tokens: the tensors of `tc_step` by its names, contiguous.
            num_reqs: of the step.
            pulse: called between layers of a long step.
        """
        lib, pool = functions(), current_pool()
        num_tokens, last = x.shape[0], len(self._parts)
        tables = tokens["tables"]
        assert tables is not None, "every step has block tables"
        step = Step(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            table_rows=tables.shape[1],
            max_blocks=tables.shape[2],
            x=x.data_ptr(),
            **{name: _address(tensor) for name, tensor in tokens.items()},
        )
        needed = lib.tc_step_scratch(self._decoder, step, torch.get_num_threads())
        scratch = self._scratch
        if scratch.numel() < needed:
            scratch = torch.empty(needed, dtype=torch.uint8)
            if num_tokens <= FEW_TOKENS:  # that of long prompts is not kept
                self._scratch = scratch
        step.scratch = scratch.data_ptr()
        if num_tokens <= FEW_TOKENS:
            lib.tc_run_layers(pool, self._decoder, step, 0, last)
            return
        for index in range(last):
            lib.tc_run_layers(pool, self._decoder, step, index, index + 1)
            pulse()

    def attend(
        self, index: int, heads: Tensor, tokens: dict[str, Tensor | None], num_reqs: int
    ) -> Tensor:
        """What lies between the projections of one layer, for profiling.

        Args:
            index: of the layer.
            heads: (T, all heads, head_dim) float32 contiguous, mutated.
            tokens: see `run`.
            num_reqs: of the step.

        Returns:
            (T, num_heads * head_dim) float32.
        """
        lib, decoder, layer = functions(), self._decoder, self._layers[index]
        tables, slots = tokens["tables"], tokens["slots"]
        assert tables is not None, "every step has block tables"
        assert slots is not None, "and slots"
        out = torch.empty(heads.shape[0], decoder.num_heads * decoder.head_dim)
        attention = Attention(
            num_reqs=num_reqs,
            num_tokens=heads.shape[0],
            tables=_address(tables[layer.group]),
            max_blocks=tables.shape[2],
            slots=_address(slots[layer.group]),
            heads=_address(heads),
            out=_address(out),
            **{name: getattr(decoder, name) for name in _OF_DECODER},
            **{name: getattr(layer, name) for name in _OF_LAYER},
            **{name: _address(tokens[name]) for name in _OF_STEP},
        )
        scratch = torch.empty(lib.tc_attention_scratch(attention, torch.get_num_threads()))
        attention.scratch = scratch.data_ptr()
        lib.tc_attention_run(current_pool(), attention)
        return out

    def _layer(self, part: LayerParts) -> Layer:
        q_norm, k_norm = part.head_norms or (None, None)
        return Layer(
            attn_norm=_address(part.attn_norm),
            attn_update_norm=_address(part.attn_update_norm),
            mlp_norm=_address(part.mlp_norm),
            mlp_update_norm=_address(part.mlp_update_norm),
            qkv=self._array(part.qkv),
            output=self._array(part.output),
            gate_up=self._array(part.gate_up),
            down=self._array(part.down),
            qkv_bias=_address(part.qkv_bias),
            output_bias=_address(part.output_bias),
            num_qkv=len(part.qkv),
            num_output=len(part.output),
            num_gate_up=len(part.gate_up),
            num_down=len(part.down),
            window=part.window,
            q_norm=_address(q_norm),
            k_norm=_address(k_norm),
            rope=_address(part.rope),
        )

    def _array(self, matrices: Sequence[NativeMatrix]) -> ctypes.Array[Weight]:
        array = weight_array(matrices)
        self._arrays.append(array)
        return array


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "the library takes no strides"
    return tensor.data_ptr()
