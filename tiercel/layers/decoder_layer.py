"""One layer of a dense decoder: attention and MLP, each with its norm."""

from __future__ import annotations

from msgspec import Struct
from torch import Tensor

from tiercel.batch import Batch
from tiercel.layers.attention import Attention, PromptPlan
from tiercel.layers.mlp import GatedMLP
from tiercel.layers.norm import RMSNorm
from tiercel.parallel import SINGLE, Group


class DecoderLayer(Struct, frozen=True):
    """Attention and MLP with their norms.

    The update that a part makes to the residual is added by the next norm, in the same pass; with
    sandwich norms (Gemma) that norm first norms the update. Where several ranks share the layer an
    update is this rank's part, which the norm adds to the others.

    group: ranks whose updates are parts; a group of one where they are whole.
    """

    attn_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP
    group: Group = SINGLE

    def __post_init__(self) -> None:
        self.attn_norm.load_for(self.attention.qkv)
        self.mlp_norm.load_for(self.mlp.gate_up)

    def __call__(
        self, x: Tensor, update: Tensor | None, batch: Batch, plan: PromptPlan | None
    ) -> Tensor:
        """The update that the next norm adds to the residual, (T, hidden).

        Args:
            x: (T, hidden) float32, the residual, updated in place.
            update: (T, hidden), of the layer before; None before the first layer.
            batch: the step.
            plan: of the step, for this layer's shape and group.
        """
        attention, mlp = self.attention, self.mlp
        update = attention(self.attn_norm.for_reader(x, update, attention.qkv), batch, plan)
        return mlp(self.mlp_norm.for_reader(x, update, mlp.gate_up))

    def whole(self, update: Tensor) -> Tensor:
        """An update of the layer, for what is no norm that adds it."""
        return self.group.all_reduce(update)
