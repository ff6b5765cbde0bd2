"""A dense decoder at true shapes with random weights drawn on the device, in types of Q4_K_M.

`RandomDecoder` is what a model asks of a `WeightReader`; where ranks share the model it draws one
rank's parts, and no file is written or read.
"""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.model_shapes import SHAPES, has_more_bits
from tiercel.models.config import ModelConfig, RopeConfig
from tiercel.models.dense_shards import RULES
from tiercel.models.sharding import Sharding
from tiercel.models.tensors import expected_shapes
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType


def decoder_config(name: str, num_layers: int, shrink: int = 1) -> ModelConfig:
    """A model of `SHAPES` with some layers; `shrink` divides its heads, widths and vocabulary."""
    shape = SHAPES[name]
    return ModelConfig(
        arch=shape.arch,
        vocab_size=shape.vocab // shrink,
        hidden_size=shape.hidden // shrink,
        num_layers=num_layers,
        num_heads=shape.heads // shrink,
        num_kv_heads=max(2, shape.kv_heads // shrink),
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate // shrink,
        norm_eps=1e-6,
        max_position=shape.context,
        tie_embeddings=False,
        activation="silu",
        rope=RopeConfig(1e6, shape.head_dim),
        layer_types=("full",) * num_layers,
        attention_scale=shape.head_dim**-0.5,
        qk_norm=shape.arch == "qwen3",
    )


class RandomDecoder:
    """Draws the weights of a dense config on a device."""

    dense_copies = True
    step_copy = True

    def __init__(self, config: ModelConfig, device: torch.device, sharding: Sharding) -> None:
        self.device = device
        self.sharding = sharding
        self.num_bytes: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self._types: dict[str, QuantType] = {}
        for name, whole in expected_shapes(config):
            cut = RULES.cut(config, sharding, name) if sharding.size > 1 else None
            rows, columns = whole if cut is None else cut.shape(whole)
            self._shapes[name] = (rows, columns)
            self._types[name] = self._type(name, whole, config.num_layers)
        del self._shapes["rope_factors"]
        tensors = {
            name: SimpleNamespace(qtype=self._types[name], shape=shape)
            for name, shape in self._shapes.items()
        }
        self.source = SimpleNamespace(names={name: name for name in tensors}, tensors=tensors)
        self._generator = torch.Generator(device).manual_seed(1)

    def has(self, name: str) -> bool:
        """Whether there is such a weight."""
        return name in self._shapes

    def file_tensor(self, name: str) -> QuantTensor:
        """A matrix of random codes under scales that keep activations near 1."""
        (rows, columns), qtype = self._shapes[name], self._types[name]
        assert columns % qtype.block_weights == 0, f"{name}: {columns} columns"
        size = (rows, columns // qtype.block_weights, qtype.block_bytes)
        blocks = torch.randint(
            0, 256, size, dtype=torch.uint8, generator=self._generator, device=self.device
        )
        spread = columns**-0.5
        if qtype is QuantType.Q4_K:  # codes of 0 to 15 under scales of 0 to 63
            factors = torch.tensor([spread / 150, spread / 20]).half().view(torch.uint8)
            blocks[..., :4] = factors.to(self.device)
        else:  # codes of -32 to 31 under scales of -128 to 127, d last
            factors = torch.tensor([spread / 1300]).half().view(torch.uint8)
            blocks[..., -2:] = factors.to(self.device)
        self.num_bytes[name] = blocks.nbytes
        return QuantTensor(qtype, Layout.FILE, (rows, columns), {"data": blocks.flatten(1)})

    stored = file_tensor

    def vector(self, name: str) -> Tensor:
        """A norm: about 1."""
        # Equal on all ranks, whose matrices may have other sizes.
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(self._shapes[name][1], generator=generator)
        return 1 + 0.1 * drawn.to(self.device)

    norm_weight = vector

    @staticmethod
    def _type(name: str, shape: tuple[int, int], num_layers: int) -> QuantType:
        if shape[0] == 1:
            return QuantType.F32
        if name == "head.weight":
            return QuantType.Q6_K
        if name.split(".")[-2] not in ("v", "down"):
            return QuantType.Q4_K
        is_better = has_more_bits(int(name.split(".")[1]), num_layers)
        return QuantType.Q6_K if is_better else QuantType.Q4_K
