"""DeepSeek-V4 as a trainable module: whole sequences, plain PyTorch, gradients by autograd.

Modules and parameters have the released names, with the experts of a layer in one stack, so that
`state_dict` is the checkpoint but for formats (`checkpoint.py`). A test compares the results with
Tiercel's own. Source: the inference code published with DeepSeek-V4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.small_v4.attention import Attention, Norm, linear
from tiercel.models.deepseek_v4 import DeepseekV4Config
from tiercel.models.rope import rope_table


@dataclass(frozen=True, slots=True)
class Result:
    """What a pass over (B, T) tokens gives.

    Attributes:
        logits: (B, T, vocab), of the tokens at t + 1.
        draft_logits: (B, T, vocab), of the tokens at t + 2.
        index_loss: of all indexers, a scalar.
    """

    logits: Tensor
    draft_logits: Tensor
    index_loss: Tensor


class Stack(nn.Module):
    """A matrix of every expert, (experts, out, in)."""

    def __init__(self, experts: int, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, outputs, inputs) * inputs**-0.5)


class Experts(nn.Module):
    """The routed experts. All are computed for each token: they are few and small."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        sizes = config.num_experts, config.intermediate_size, config.hidden_size
        self.w1 = Stack(*sizes)
        self.w3 = Stack(*sizes)
        self.w2 = Stack(sizes[0], sizes[2], sizes[1])
        self.limit = config.swiglu_limit

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        """Weighted sums of x (..., hidden), by shares (..., experts), 0 for those not chosen."""
        gate = functional.linear(x, self.w1.weight.flatten(0, 1))
        up = functional.linear(x, self.w3.weight.flatten(0, 1))
        act = clamped_swiglu(gate, up, self.limit).unflatten(-1, (shares.shape[-1], -1))
        act = act * shares.to(act.dtype).unsqueeze(-1)
        return functional.linear(act.flatten(-2), self.w2.weight.transpose(0, 1).flatten(1))


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) * up; the gate is clamped above alone."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return functional.silu(gate) * up


class SharedExpert(nn.Module):
    """The expert that every token passes."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        self.w1 = linear(config.intermediate_size, config.hidden_size)
        self.w3 = linear(config.intermediate_size, config.hidden_size)
        self.w2 = linear(config.hidden_size, config.intermediate_size)
        self.limit = config.shared_swiglu_limit

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(clamped_swiglu(self.w1(x), self.w3(x), self.limit))


class Gate(nn.Module):
    """The router: by a random table of token ids, or by learned scores and a bias.

    Attributes:
        load: (experts,) float32, tokens of the last pass that chose each expert.
    """

    def __init__(self, config: DeepseekV4Config, *, is_hash_routed: bool) -> None:
        super().__init__()
        experts, self.topk = config.num_experts, config.num_experts_per_tok
        self.weight = nn.Parameter(torch.randn(experts, config.hidden_size))
        nn.init.normal_(self.weight, std=config.hidden_size**-0.5)
        self.register_buffer("load", torch.zeros(experts), persistent=False)
        self.scale = config.routed_scaling_factor
        self.is_hash_routed = is_hash_routed
        if is_hash_routed:
            order = torch.rand(config.vocab_size, experts).argsort(1)[:, : self.topk]
            self.register_buffer("tid2eid", order.contiguous())
        else:
            self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Shares of the experts, (B, T, experts), of x (B, T, hidden) and token ids (B, T)."""
        with torch.autocast(x.device.type, enabled=False):
            scores = functional.softplus(functional.linear(x.float(), self.weight)).sqrt()
        if self.is_hash_routed:
            chosen = self.tid2eid[ids]
        else:
            chosen = (scores.detach() + self.bias).topk(self.topk, dim=-1).indices
        own = scores.gather(-1, chosen)
        own = own / (own.sum(-1, keepdim=True) + 1e-20) * self.scale
        shares = torch.zeros_like(scores).scatter(-1, chosen, own)
        with torch.no_grad():
            self.load.copy_((shares > 0).flatten(0, 1).sum(0))
        return shares

    @torch.no_grad()
    def balance(self, rate: Tensor) -> None:
        """Move the bias towards experts with few tokens. Source: arXiv 2408.15664."""
        if not self.is_hash_routed:
            self.bias.add_(torch.sign(self.load.mean() - self.load) * rate)


class MoE(nn.Module):
    """Router, routed experts and the shared one."""

    def __init__(self, config: DeepseekV4Config, *, is_hash_routed: bool) -> None:
        super().__init__()
        self.gate = Gate(config, is_hash_routed=is_hash_routed)
        self.experts = Experts(config)
        self.shared_experts = SharedExpert(config)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.experts(x, self.gate(x, ids)) + self.shared_experts(x)


def add_collapse(module: nn.Module, config: DeepseekV4Config) -> None:
    """Give a module what `collapse` reads; the names are those of its checkpoint."""
    streams, width = config.num_streams, config.num_streams * config.hidden_size
    module.hc_head_fn = nn.Parameter(torch.randn(streams, width) * width**-0.5)
    module.hc_head_base = nn.Parameter(torch.zeros(streams))
    module.hc_head_scale = nn.Parameter(torch.full((1,), 0.1))
    module.norm = Norm(config.hidden_size, config.norm_eps)


def collapse(module: nn.Module, config: DeepseekV4Config, streams: Tensor) -> Tensor:
    """(B, T, streams, hidden) to (B, T, hidden) normed, float32."""
    with torch.autocast(streams.device.type, enabled=False):
        mix = _mix(streams, module.hc_head_fn, config.norm_eps)
        pre = torch.sigmoid(mix * module.hc_head_scale + module.hc_head_base) + config.hc_eps
        return module.norm((pre.unsqueeze(-2) @ streams).squeeze(-2))


def _mix(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Products of fn with all streams of a token, which are divided by their root mean square."""
    flat = streams.flatten(-2)
    return functional.linear(functional.rms_norm(flat, flat.shape[-1:], eps=eps), fn)


class Block(nn.Module):
    """A layer: attention and experts, each between two mixes of the residual streams."""

    def __init__(
        self, config: DeepseekV4Config, number: int, ratio: int, *, is_hash_routed: bool
    ) -> None:
        """Make the layer.

        Args:
            config: the shape.
            number: of the layer. Each half first reads another stream, so that streams, which
                begin as copies, become different. Source: arXiv 2409.19606.
            ratio: tokens per entry, 0 for a window alone.
            is_hash_routed: whether token ids choose experts.
        """
        super().__init__()
        streams, hidden = config.num_streams, config.hidden_size
        rows, width = streams * (2 + streams), streams * hidden
        for half, kind in enumerate(("attn", "ffn")):
            base = torch.zeros(rows)
            base[:streams] = -2.0
            base[(2 * number + half) % streams] = 2.0
            base[2 * streams :] = 4 * torch.eye(streams).flatten()
            self.register_parameter(
                f"hc_{kind}_fn", nn.Parameter(torch.randn(rows, width) * width**-0.5)
            )
            self.register_parameter(f"hc_{kind}_base", nn.Parameter(base))
            self.register_parameter(f"hc_{kind}_scale", nn.Parameter(torch.full((3,), 0.1)))
        self.attn_norm = Norm(hidden, config.norm_eps)
        self.attn = Attention(config, ratio)
        self.ffn_norm = Norm(hidden, config.norm_eps)
        self.ffn = MoE(config, is_hash_routed=is_hash_routed)
        self.config = config
        self.ratio = ratio

    def layer(self, streams: Tensor, ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, streams, hidden) float32 after the layer, and the loss of its indexer."""
        x, post, comb = self._pre(streams, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base)
        y, loss = self.attn(self.attn_norm(x), table)
        streams = _post(streams, y, post, comb)
        x, post, comb = self._pre(streams, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base)
        return _post(streams, self.ffn(self.ffn_norm(x), ids), post, comb), loss

    def _pre(
        self, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        config, n = self.config, self.config.num_streams
        with torch.autocast(streams.device.type, enabled=False):
            mix = _mix(streams, fn, config.norm_eps)
            pre, post, comb = mix.split([n, n, n * n], dim=-1)
            pre = torch.sigmoid(pre * scale[0] + base[:n]) + config.hc_eps
            post = 2 * torch.sigmoid(post * scale[1] + base[n : 2 * n])
            comb = (comb * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
            comb = _sinkhorn(comb, config.sinkhorn_iters, config.hc_eps)
            return (pre.unsqueeze(-2) @ streams).squeeze(-2), post, comb


def _post(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post[j] * y + the sum over i of comb[i, j] * streams[i]."""
    with torch.autocast(streams.device.type, enabled=False):
        return post.unsqueeze(-1) * y.float().unsqueeze(-2) + comb.mT @ streams


def _sinkhorn(scores: Tensor, iterations: int, eps: float) -> Tensor:
    """Positive matrices with columns, and nearly rows, of sum 1."""
    c = scores.softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


class DraftBlock(Block):
    """The MTP block: a layer with a window alone, and its own collapse before the shared head."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__(config, config.num_layers, 0, is_hash_routed=False)
        hidden = config.hidden_size
        self.enorm = Norm(hidden, config.norm_eps)
        self.hnorm = Norm(hidden, config.norm_eps)
        self.e_proj = linear(hidden, hidden)
        self.h_proj = linear(hidden, hidden)
        add_collapse(self, config)

    def forward(self, streams: Tensor, embedded: Tensor, ids: Tensor, table: Tensor) -> Tensor:
        """Normed states (B, T, hidden) of the tokens at t + 2.

        Args:
            streams: (B, T, streams, hidden) after the last layer at t.
            embedded: (B, T, hidden) of the tokens at t + 1.
            ids: (B, T), the tokens at t + 1.
            table: of layers with a window alone.
        """
        own = self.e_proj(self.enorm(embedded)).float().unsqueeze(-2)
        mixed = self.h_proj(self.hnorm(streams)).float() + own
        return collapse(self, self.config, self.layer(mixed, ids, table)[0])


class SmallV4(nn.Module):
    """The whole model."""

    def __init__(self, config: DeepseekV4Config, num_positions: int) -> None:
        """Make random weights, by PyTorch's generator.

        Args:
            config: the shape, with an MTP block.
            num_positions: tokens of a sequence at most.
        """
        super().__init__()
        vocab, hidden = config.vocab_size, config.hidden_size
        self.config = config
        self.embed = linear(vocab, hidden)
        self.layers = nn.ModuleList(
            Block(config, i, config.compress_ratios[i], is_hash_routed=i < config.num_hash_layers)
            for i in range(config.num_layers)
        )
        add_collapse(self, config)
        self.head = linear(vocab, hidden)
        self.mtp = nn.ModuleList([DraftBlock(config)])
        for ropes in ("rope", "rope_compress"):
            table = rope_table(getattr(config, ropes), num_positions)
            self.register_buffer(ropes, table, persistent=False)

    def forward(self, ids: Tensor, following: Tensor) -> Result:
        """Compute the logits of all positions.

        Args:
            ids: (B, T) int64.
            following: (B, T) int64, the token after each of them.
        """
        window, compress = (table[: ids.shape[1]] for table in (self.rope, self.rope_compress))
        streams = self._embedded(ids).unsqueeze(-2)
        streams = streams.repeat(1, 1, self.config.num_streams, 1)
        index_loss = streams.new_zeros(())
        for layer in self.layers:
            streams, loss = layer.layer(streams, ids, compress if layer.ratio else window)
            index_loss = index_loss + loss
        states = collapse(self, self.config, streams)
        drafts = self.mtp[0](streams, self._embedded(following), following, window)
        return Result(self.head(states), self.head(drafts), index_loss)

    def gates(self) -> list[Gate]:
        """The routers of all layers."""
        return [module for module in self.modules() if isinstance(module, Gate)]

    def _embedded(self, ids: Tensor) -> Tensor:
        # Not `embedding`: the gradient of this is a scatter, which a CUDA graph captures.
        rows = self.embed.weight.index_select(0, ids.flatten())
        return rows.view(*ids.shape, -1)
