"""Builds the parts of DeepSeek-V4 from a file's tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.config import ModelOptions
from tiercel.layers.compressed_attention import (
    CompressedAttention,
    Compression,
    LatentOutput,
    LatentProjections,
)
from tiercel.layers.compressor import Compressor
from tiercel.layers.embedding import Embedding
from tiercel.layers.head import Head
from tiercel.layers.indexer import Indexer
from tiercel.layers.latent_cache import LatentFormat
from tiercel.layers.linear import Linear
from tiercel.layers.linear_group import GroupedLinear
from tiercel.layers.mhc import HyperConnection, StreamCollapse
from tiercel.layers.mhc_layer import HyperLayer
from tiercel.layers.moe import MoE, Router, SharedExpert
from tiercel.layers.norm import RMSNorm
from tiercel.models.deepseek_v4 import CSA_RATIO, DeepseekV4Config
from tiercel.models.rope import rope_table
from tiercel.models.weights import WeightReader
from tiercel.ops.linear import prepare_linear
from tiercel.ops.linear_group import Q8Planes
from tiercel.ops.moe_experts import rest_experts
from tiercel.ops.moe_experts_torch import Experts
from tiercel.parallel import SINGLE, Group
from tiercel.quant_types import Layout, QuantType

_STACKS = ("w1", "w3", "w2")  # gate, up and down of the experts


class DeepseekV4Builder:
    """Turns tensors, or a rank's parts of them, into layers."""

    def __init__(
        self,
        config: DeepseekV4Config,
        weights: WeightReader,
        dtype: torch.dtype,
        num_positions: int,
        options: ModelOptions,
        group: Group = SINGLE,
    ) -> None:
        """Make what layers share.

        Args:
            config: checked against the file already.
            weights: reads the file's tensors to the device.
            dtype: of products.
            num_positions: that rotary tables cover.
            options: resolved; no value is ``auto``.
            group: the ranks that share the model.
        """
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self.is_native = options.numerics == "native"
        self.group = group
        # Of attention, embedding and head.
        self.tensor_group = group if weights.sharding.tensor_parallel else SINGLE
        self.latents = LatentFormat(
            config.head_dim,
            config.rotary_dim,
            config.index_head_dim,
            options.kv_dtype,
            self.is_native,
        )
        device = weights.device
        self._window_table = rope_table(config.rope, num_positions).to(device)
        self._compress_table = rope_table(config.rope_compress, num_positions).to(device)

    def embedding(self) -> Embedding:
        """The table of token embeddings."""
        table, group = self.weights.weight("embed.weight"), self.tensor_group
        first_id = 0
        if group.size > 1:
            first_id, _ = self.weights.sharding.vocab_part(self.config.vocab_size)
        return Embedding(table, 1.0, group, first_id)

    def head(self) -> Head:
        """The output matrix."""
        own = self.linear("head.weight", wide=True)
        return Head(own, self.config.vocab_size, self.tensor_group)

    def norm(self, name: str) -> RMSNorm:
        """The norm of a name, to the dtype of products."""
        return RMSNorm(self.weights.vector(f"{name}.weight"), self.config.norm_eps, self.dtype)

    def linear(self, *names: str, wide: bool = False, group: Group = SINGLE) -> Linear:
        """One projection of matrices that share their input.

        Args:
            names: of the matrices.
            wide: with float32 results.
            group: ranks that have other columns of them, and of the input.
        """
        parts = [self.weights.weight(name) for name in names]
        weight = prepare_linear(
            parts,
            self.dtype,
            self.weights.device,
            wide=wide,
            dense_copies=self.weights.dense_copies,
            reads_q8=True,
        )
        is_block = any(part.layout is Layout.BLOCKS for part in parts)
        return Linear(
            weight,
            out_dtype=torch.float32 if wide else None,
            rounds_input=self.is_native and is_block,
            group=group,
        )

    def _grouped(self, name: str, num_groups: int) -> GroupedLinear:
        """A layer of groups of heads, in the forms of `linear`."""
        weight = self.weights.weight(name)
        if weight.qtype is not QuantType.Q8_0 or self.weights.device.type == "cpu":
            return GroupedLinear(weight, num_groups)
        prepared = prepare_linear(
            [weight],
            self.dtype,
            self.weights.device,
            dense_copies=self.weights.dense_copies,
            reads_q8=True,
        )
        (segment,) = prepared.segments
        assert isinstance(segment, Tensor | Q8Planes), "Q8_0 on a GPU"
        return GroupedLinear(segment, num_groups, prepared.dense)

    def collapse(self, prefix: str) -> StreamCollapse:
        """The weights before a final norm; `prefix` is empty or ends with a dot."""
        fn, scale, base = self._mix(f"{prefix}hc_head")
        return StreamCollapse(fn, scale, base, self.config.norm_eps, self.config.hc_eps)

    def layer(self, prefix: str, ratio: int, *, is_hash_routed: bool) -> HyperLayer:
        """A layer, or the block of the draft head.

        Args:
            prefix: of its tensors, such as ``layers.3``.
            ratio: tokens per compressed entry; 0 for a window alone.
            is_hash_routed: whether a table chooses experts.
        """
        return HyperLayer(
            self._hyper_connection(f"{prefix}.hc_attn"),
            self.norm(f"{prefix}.attn_norm"),
            self._attention(f"{prefix}.attn", ratio),
            self._hyper_connection(f"{prefix}.hc_ffn"),
            self.norm(f"{prefix}.ffn_norm"),
            self._moe(f"{prefix}.ffn", is_hash_routed=is_hash_routed),
        )

    def _mix(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights = self.weights
        return (
            weights.floats(f"{prefix}_fn"),
            weights.vector(f"{prefix}_scale"),
            weights.vector(f"{prefix}_base"),
        )

    def _hyper_connection(self, prefix: str) -> HyperConnection:
        config = self.config
        return HyperConnection(
            *self._mix(prefix), config.norm_eps, config.hc_eps, config.sinkhorn_iters
        )

    def _attention(self, prefix: str, ratio: int) -> CompressedAttention:
        config = self.config
        table = self._compress_table if ratio else self._window_table
        projections = LatentProjections(
            self.linear(f"{prefix}.wq_a.weight"),
            self.norm(f"{prefix}.q_norm"),
            self.linear(f"{prefix}.wq_b.weight"),
            self.linear(f"{prefix}.wkv.weight"),
            self.weights.vector(f"{prefix}.kv_norm.weight"),
            table,
            config.norm_eps,
        )
        output = LatentOutput(
            self._grouped(
                f"{prefix}.wo_a.weight", config.num_output_groups // self.tensor_group.size
            ),
            self.linear(f"{prefix}.wo_b.weight", group=self.tensor_group),
        )
        compression = self._compression(prefix, ratio) if ratio else None
        sink = self.weights.vector(f"{prefix}.attn_sink")
        return CompressedAttention(self.latents, projections, sink, output, compression)

    def _compression(self, prefix: str, ratio: int) -> Compression:
        names = [f"{prefix}.compressor.{part}.weight" for part in ("wkv", "wgate")]
        indexer = None
        if ratio == CSA_RATIO:
            inner = f"{prefix}.indexer"
            names += [f"{inner}.compressor.{part}.weight" for part in ("wkv", "wgate")]
            names.append(f"{inner}.weights_proj.weight")
            indexer = Indexer(
                self.linear(f"{inner}.wq_b.weight"),
                self.config.index_num_heads,
                self.config.index_topk,
                self._compressor(f"{inner}.compressor"),
                self._compress_table,
                self.latents,
            )
        project = self.linear(*names, wide=True)
        return Compression(project, self._compressor(f"{prefix}.compressor"), indexer, ratio)

    def _compressor(self, prefix: str) -> Compressor:
        return Compressor(
            self.weights.floats(f"{prefix}.ape"),
            self.weights.vector(f"{prefix}.norm.weight"),
            self.config.norm_eps,
            self._compress_table,
        )

    def _moe(self, prefix: str, *, is_hash_routed: bool) -> MoE:
        config, weights = self.config, self.weights
        router = Router(
            self.linear(f"{prefix}.gate.weight", wide=True),
            None if is_hash_routed else weights.vector(f"{prefix}.gate.bias"),
            weights.integers(f"{prefix}.gate.tid2eid") if is_hash_routed else None,
            config.num_experts_per_tok,
            config.routed_scaling_factor,
        )
        w1, w3, w2 = (weights.weight(f"{prefix}.experts.{part}.weight") for part in _STACKS)
        shared = SharedExpert(
            self.linear(*(f"{prefix}.shared_experts.{part}.weight" for part in ("w1", "w3"))),
            self.linear(f"{prefix}.shared_experts.w2.weight"),
            config.shared_swiglu_limit,
        )
        is_rounded = self.is_native and w1.layout is Layout.BLOCKS
        experts = Experts(w1, w3, w2)
        if not is_rounded:
            experts = rest_experts(experts, self.dtype)
        own = None
        if self.group.size > 1 and weights.sharding.expert_parallel:
            own = range(*weights.sharding.part(config.num_experts))
        return MoE(router, experts, shared, config.swiglu_limit, is_rounded, self.group, own)
