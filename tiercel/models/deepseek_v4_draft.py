"""The head of DeepSeek-V4 that drafts: multi-token prediction (MTP), depth 1."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tiercel.batch import Batch
from tiercel.layers.embedding import Embedding
from tiercel.layers.head import Head
from tiercel.layers.mhc import Residual
from tiercel.models.deepseek_v4_build import DeepseekV4Builder
from tiercel.ops.step_index_torch import StepIndex


class IndexStep(Protocol):
    """Makes the indices of a step for layers with a window alone."""

    def __call__(self, batch: Batch, *, has_window_alone: bool) -> StepIndex:
        """See `step_index`."""


class DeepseekV4DraftHead:
    """A block with a window alone, around the model's embedding and head.

        E = e_proj(norm(embedding[next token])), H[j] = h_proj(norm(X[j])) of each stream j
        Y = block(E + H);  logits = head(norm(collapse(Y)))

    It has a window cache of its own, at the same slots. Source: the inference code published with
    DeepSeek-V4; "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2.
    """

    def __init__(
        self,
        builder: DeepseekV4Builder,
        embedding: Embedding,
        head: Head,
        index: IndexStep,
    ) -> None:
        """Load the block; `index` is the model's."""
        config, prefix = builder.config, "mtp.0"
        self.layer = builder.layer(prefix, 0, is_hash_routed=False)
        self._streams_shape = (-1, config.num_streams, config.hidden_size)
        self._embedding = embedding
        self._embed_norm = builder.norm(f"{prefix}.enorm")
        self._embed_proj = builder.linear(f"{prefix}.e_proj.weight")
        self._hidden_norm = builder.norm(f"{prefix}.hnorm")
        self._hidden_proj = builder.linear(f"{prefix}.h_proj.weight")
        self._collapse = builder.collapse(f"{prefix}.")
        self._norm = builder.norm(f"{prefix}.norm")
        self._head = head
        self._index = index

    def forward(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Pass some positions through the block.

        Args:
            batch: of the positions p, with the tokens at p + 1.
            hidden: (T, streams * hidden) at p, of the model's `forward` or of this one.

        Returns:
            (T, streams * hidden), dtype of hidden.
        """
        embedded = self._embed_proj(self._embed_norm(self._embedding(batch.input_ids)))
        streams = self._streams(hidden)
        projected = self._hidden_proj(self._hidden_norm(streams.flatten(0, 1)))
        mixed = projected.float().view(streams.shape) + embedded.float().unsqueeze(1)
        step = self._index(batch, has_window_alone=True)
        entered = Residual(mixed.to(hidden.dtype))
        residual = self.layer(entered, batch.input_ids, step, batch.rank_tokens)
        return residual.settled().flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        """(L, vocab_size) float32 of the tokens at p + 2, from (L, streams * hidden)."""
        return self._head(self._norm(self._collapse(self._streams(hidden))))

    def _streams(self, hidden: Tensor) -> Tensor:
        return hidden.view(self._streams_shape)
