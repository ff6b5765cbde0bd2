"""One layer of a dense decoder: attention and MLP, each with its norm."""

from __future__ import annotations

from msgspec import Struct
from torch import Tensor

from tiercel.batch import Batch
from tiercel.layers.attention import Attention, PromptPlan
from tiercel.layers.mlp import GatedMLP
from tiercel.layers.norm import RMSNorm
from tiercel.ops.packed_gemm import TokenImage
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

    def load_before(self, following: DecoderLayer) -> None:
        """Load every kernel that a call may launch besides those of this layer alone."""
        orders = self.mlp_norm.orders_after_product(self.mlp.gate_up)
        if orders:
            self.attention.output.load_into_norm(orders)
            self.mlp.load_normed()
        orders = following.attn_norm.orders_after_product(following.attention.qkv)
        if orders:
            self.mlp.load_into_norm(orders)
            following.attention.qkv.load_normed()

    def __call__(
        self,
        x: Tensor,
        update: Tensor | TokenImage | None,
        batch: Batch,
        plan: PromptPlan | None,
        following: DecoderLayer | None = None,
    ) -> Tensor | TokenImage:
        """The update that the next norm adds to the residual, (T, hidden); or that norm's image.

        Args:
            x: (T, hidden) float32, the residual, updated in place.
            update: of the layer before; None before the first layer.
            batch: the step.
            plan: of the step, for this layer's shape and group.
            following: the layer whose norm products may take over; None for an update.
        """
        attention, mlp = self.attention, self.mlp
        if not isinstance(update, TokenImage):
            update = self.attn_norm.for_reader(x, update, attention.qkv)
        heads = attention.heads(update, batch, plan)
        normed: Tensor | TokenImage | None = None
        if following is not None and isinstance(update, TokenImage):
            norm = self.mlp_norm.after_product(x, update, mlp.gate_up)
            normed = None if norm is None else attention.output.into_norm(heads, norm)
        if normed is None:
            normed = self.mlp_norm.for_reader(x, attention.output(heads), mlp.gate_up)
        if following is None or not isinstance(normed, TokenImage):
            return mlp(normed)
        norm = following.attn_norm.after_product(x, normed, following.attention.qkv)
        done = None if norm is None else mlp.into_norm(normed, norm)
        return mlp(normed) if done is None else done

    def whole(self, update: Tensor) -> Tensor:
        """An update of the layer, for what is no norm that adds it."""
        return self.group.all_reduce(update)
