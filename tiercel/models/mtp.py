"""The layer of a dense model that drafts: multi-token prediction (MTP)."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.layers.decoder_layer import DecoderLayer
from tiercel.layers.embedding import Embedding
from tiercel.layers.fused_decode_step import FusedDecodeStep
from tiercel.layers.head import Head
from tiercel.layers.linear import Linear
from tiercel.layers.native_layers import NativeDecoderLayers
from tiercel.layers.norm import RMSNorm


class MtpHead:
    """A draft head: from a token's hidden state and the next token it predicts the one after that.

        x = layer(proj([norm(embedding[next token]), norm(hidden)]))
        logits = head(norm(x))

    It has a cache of its own, at the same slots, and shares the model's embedding and head.

    Source: "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2.
    """

    def __init__(
        self,
        embedding: Embedding,
        head: Head,
        embed_norm: RMSNorm,
        hidden_norm: RMSNorm,
        proj: Linear,
        layer: DecoderLayer,
        norm: RMSNorm,
        native_layer: NativeDecoderLayers | None = None,
    ) -> None:
        self.layer = layer
        self.fused_layer: FusedDecodeStep | None = None  # of a single token; set where it fits
        self._native_layer = native_layer
        self._embedding = embedding
        self._head = head
        self._embed_norm = embed_norm
        self._hidden_norm = hidden_norm
        self._proj = proj
        self._norm = norm

    def bind_cache(self, planes: dict[str, Tensor], group: int) -> None:
        """Take the planes that the layer's attention was given, found through a group's tables."""
        if self.fused_layer is not None:
            self.fused_layer.bind_cache([planes], [group])
        if self._native_layer is not None:
            self._native_layer.bind_cache()

    def forward(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Pass some positions through the layer.

        Args:
            batch: of the positions p, with the tokens at p + 1.
            hidden: (T, hidden) float32 at p, of the model's `forward` or of this one.

        Returns:
            (T, hidden) float32.
        """
        embedded = self._embed_norm(self._embedding(batch.input_ids))
        x = self._proj(torch.cat((embedded, self._hidden_norm(hidden)), dim=1)).float()
        if self.fused_layer is not None and self.fused_layer.supports(batch):
            return self.fused_layer(x, batch)
        if self._native_layer is not None:
            return self._native_layer(x, batch, lambda: None)
        update = self.layer(x, None, batch, self.layer.attention.plan(batch))
        assert isinstance(update, Tensor), "no layer follows"
        return x.add_(self.layer.whole(update))

    def logits(self, hidden: Tensor) -> Tensor:
        """(L, vocab_size) float32 of the tokens at p + 2, from (L, hidden) of `forward`."""
        return self._head(self._norm(hidden))
