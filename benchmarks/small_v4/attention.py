"""Trainable attention of DeepSeek-V4 over whole sequences, without a cache.

Scores with the window are computed in chunks of one window: the queries of a chunk meet the keys of
the chunk and of the one before it, so their number does not grow with the length. Entries are few.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tiercel.models.deepseek_v4 import CSA_RATIO, DeepseekV4Config

HIDDEN_SCORE = -1e30  # of keys that a query does not see; finite, so no row is NaN


def linear(outputs: int, inputs: int) -> nn.Linear:
    """A projection without a bias, with outputs of unit variance for inputs of unit variance."""
    projection = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(projection.weight, std=inputs**-0.5)
    return projection


class Norm(nn.Module):
    """RMSNorm with a weight, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, table: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate adjacent pairs of the last channels of x (..., T, d) or, by heads, (..., T, h, d).

    table: (T, 2, half) float32 cosines and sines, or (T, 1, 2, half) for heads.
    """
    cos, sin = table.unbind(-2)
    sin = -sin if inverse else sin
    rotary = 2 * cos.shape[-1]
    plain, pairs = x.split([x.shape[-1] - rotary, rotary], dim=-1)
    a, b = pairs.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), dim=-1)


class Compressor(nn.Module):
    """Entries of `ratio` tokens: softmax sums of their projections, channel by channel."""

    def __init__(self, hidden: int, width: int, ratio: int, eps: float) -> None:
        super().__init__()
        rows = 2 * width if ratio == CSA_RATIO else width  # CSA: entries overlap
        self.wkv = linear(rows, hidden)
        self.wgate = linear(rows, hidden)
        self.ape = nn.Parameter(torch.randn(ratio, rows) * 0.02)
        self.norm = Norm(width, eps)
        self.width = width
        self.ratio = ratio

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """(B, T, hidden) to (B, T // ratio, width), rotated; table: (T, 2, half)."""
        count = x.shape[1] // self.ratio
        x = x[:, : count * self.ratio]
        values = self.wkv(x).float().unflatten(1, (count, self.ratio))
        gates = self.wgate(x).float().unflatten(1, (count, self.ratio)) + self.ape
        if values.shape[-1] == 2 * self.width:
            values = self._with_overlap(values, 0.0)
            gates = self._with_overlap(gates, HIDDEN_SCORE)
        entries = (gates.softmax(2) * values).sum(2)
        return rotate(self.norm(entries), table[: count * self.ratio : self.ratio])

    def _with_overlap(self, parts: Tensor, absent: float) -> Tensor:
        """The first half of the channels of the entry before, and the second half of its own."""
        before, own = parts.chunk(2, dim=-1)
        before = functional.pad(before[:, :-1], (0, 0, 0, 0, 1, 0), value=absent)
        return torch.cat((before, own), dim=2)


class Indexer(nn.Module):
    """Scores of entries; its inputs are detached, it learns from `Attention` alone."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        heads, width = config.index_num_heads, config.index_head_dim
        self.wq_b = linear(heads * width, config.q_lora_rank)
        self.weights_proj = linear(heads, config.hidden_size)
        self.compressor = Compressor(config.hidden_size, width, CSA_RATIO, config.norm_eps)
        self.num_heads = heads
        self.scale = (heads * width) ** -0.5

    def forward(self, x: Tensor, qr: Tensor, table: Tensor) -> Tensor:
        """(B, T, entries) float32 scores, of x (B, T, hidden) and qr (B, T, q_lora_rank)."""
        x, qr = x.detach(), qr.detach()
        q = rotate(self.wq_b(qr).unflatten(-1, (self.num_heads, -1)), table.unsqueeze(1))
        keys = self.compressor(x, table)
        dots = (q.flatten(1, 2) @ keys.to(q.dtype).mT).unflatten(1, (-1, self.num_heads))
        weights = self.weights_proj(x).float() * self.scale
        return (dots.float().relu() * weights.unsqueeze(-1)).sum(2)


class Attention(nn.Module):
    """Attention of one layer; parameters are named as in the released checkpoints."""

    def __init__(self, config: DeepseekV4Config, ratio: int) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        heads, groups = config.num_heads, config.num_output_groups
        self.config = config
        self.wq_a = linear(config.q_lora_rank, hidden)
        self.q_norm = Norm(config.q_lora_rank, config.norm_eps)
        self.wq_b = linear(heads * width, config.q_lora_rank)
        self.wkv = linear(width, hidden)
        self.kv_norm = Norm(width, config.norm_eps)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.wo_a = linear(groups * config.o_lora_rank, heads * width // groups)
        self.wo_b = linear(hidden, groups * config.o_lora_rank)
        self.compressor = Compressor(hidden, width, ratio, config.norm_eps) if ratio else None
        self.indexer = Indexer(config) if ratio == CSA_RATIO else None
        self.ratio = ratio

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, hidden) normed to (B, T, hidden), and the loss of the indexer.

        table: (T, 2, half) float32, cosines and sines of this kind of layer.
        """
        config, heads_table = self.config, table.unsqueeze(1)
        qr = self.q_norm(self.wq_a(x))
        q = self.wq_b(qr).unflatten(-1, (config.num_heads, config.head_dim))
        q = functional.rms_norm(q.float(), q.shape[-1:], eps=config.norm_eps)
        q = rotate(q, heads_table)
        kv = rotate(self.kv_norm(self.wkv(x)), table)
        entries = scores = None
        if self.compressor is not None and x.shape[1] >= self.ratio:
            entries = self.compressor(x, table)
            scores = None if self.indexer is None else self.indexer(x, qr, table)
        out, loss = self._attend(q, kv, entries, scores)
        out = rotate(out, heads_table, inverse=True)
        parts = out.flatten(2).unflatten(-1, (config.num_output_groups, -1))
        wo_a = self.wo_a.weight.unflatten(0, (config.num_output_groups, -1))
        return self.wo_b(torch.einsum("btgi,goi->btgo", parts, wo_a).flatten(2)), loss

    def _attend(
        self, q: Tensor, kv: Tensor, entries: Tensor | None, scores: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One softmax over window, entries and sink: (B, T, heads, d), and the indexer's loss."""
        length, window = q.shape[1], self.config.sliding_window
        missing = -length % window
        q = functional.pad(q * self.config.head_dim**-0.5, (0, 0, 0, 0, 0, missing))
        q = q.unflatten(1, (-1, window)).transpose(2, 3)  # (B, chunks, heads, window, d)
        kv = functional.pad(kv, (0, 0, 0, missing)).unflatten(1, (-1, window))
        keys = torch.cat((functional.pad(kv, (0, 0, 0, 0, 1, 0))[:, :-1], kv), dim=2)
        logits = (q.flatten(2, 3) @ keys.mT).view(*q.shape[:4], 2 * window)
        parts = [logits.masked_fill(~_window_mask(logits), HIDDEN_SCORE)]
        loss = q.new_zeros((), dtype=torch.float32)
        if entries is not None:
            listed = (q.flatten(1, 3) @ entries.mT).view(*q.shape[:4], -1)
            visible = _chunks(self._visible(length, entries), window)
            if scores is not None:
                chosen = _chunks(self._choose(scores), window)
                loss = _index_loss(listed.detach(), _chunks(scores, window), visible)
                listed = listed.masked_fill(~chosen.unsqueeze(2), HIDDEN_SCORE)
            parts.append(listed.masked_fill(~visible.unsqueeze(2), HIDDEN_SCORE))
        sink = self.attn_sink[:, None, None].expand(*q.shape[:4], 1)
        joint = torch.cat((*parts, sink.to(parts[0].dtype)), dim=-1)
        shares = joint.softmax(-1, dtype=torch.float32).to(joint.dtype)
        out = shares[..., : 2 * window].flatten(2, 3) @ keys
        out = out.view(q.shape)
        if entries is not None:
            own = shares[..., 2 * window : -1].flatten(1, 3) @ entries
            out = out + own.view(q.shape)
        return out.transpose(2, 3).flatten(1, 2)[:, :length], loss

    def _visible(self, length: int, entries: Tensor) -> Tensor:
        """(1, T, entries): token t sees those whose last token is not after it."""
        number = torch.arange(length, device=entries.device)
        entry = torch.arange(entries.shape[1], device=entries.device)
        return (entry < ((number + 1) // self.ratio)[:, None]).unsqueeze(0)

    def _choose(self, scores: Tensor) -> Tensor:
        """(B, T, entries): the best visible entries, ties to the lower one."""
        scores = scores.detach().masked_fill(~self._visible(scores.shape[1], scores.mT), -torch.inf)
        order = scores.argsort(dim=-1, descending=True, stable=True)[..., : self.config.index_topk]
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True)


def _chunks(rows: Tensor, window: int) -> Tensor:
    """(B, T, n) to (B, chunks, window, n), zero padded."""
    missing = -rows.shape[1] % window
    return functional.pad(rows, (0, 0, 0, missing)).unflatten(1, (-1, window))


def _window_mask(logits: Tensor) -> Tensor:
    """(chunks, 1, window, 2 * window): the keys of the last `window` positions, from position 0."""
    num_chunks, window = logits.shape[1], logits.shape[3]
    device = logits.device
    row = torch.arange(window, device=device)[:, None]
    key = torch.arange(2 * window, device=device)  # of the chunk before, then of its own
    is_near = (key > row) & (key <= row + window)
    is_there = (torch.arange(num_chunks, device=device)[:, None] > 0) | (key >= window)
    return (is_near & is_there.unsqueeze(1)).unsqueeze(1)


def _index_loss(listed: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """KL divergence of the scores' softmax from the mean of the heads' attention to entries.

    listed: (B, chunks, heads, window, entries) scores of attention.
    scores: (B, chunks, window, entries) of the indexer.
    visible: (1, chunks, window, entries).

    Source: "DeepSeek-V3.2" technical report, the indexer's loss; here over all visible entries.
    """
    wanted = listed.float().masked_fill(~visible.unsqueeze(2), HIDDEN_SCORE).softmax(-1).mean(2)
    logs = scores.masked_fill(~visible, HIDDEN_SCORE).log_softmax(-1)
    # Hidden entries have a share of 0 but in rows that see none, which are left out.
    divergence = (torch.xlogy(wanted, wanted) - wanted * logs).sum(-1)
    has_any = visible.any(-1).expand(divergence.shape)
    return torch.where(has_any, divergence, 0.0).sum() / has_any.sum().clamp(min=1)
