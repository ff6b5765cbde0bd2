"""Decode attention against its floor, beside PyTorch's attention on contiguous keys.

    python -m benchmarks.decode_attention --device cuda --out results/paged_attention_h200.json

`benchmarks.decode_attention_sweep` times candidate configs of the Triton kernel.

Floor: the larger of the visible keys and values, the queries and the result moved once, and the
products over visible keys at the measured matrix rate. The peer is scaled_dot_product_attention on
contiguous keys of equal lengths: what is lost to it is the price of gathering and masking.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.op_timing import Case, bench_chosen, parse_cases, relative_error
from tiercel.batch import Batch
from tiercel.ops.decode_attention import decode_attention
from tiercel.reference import decode_attention as oracle

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """Equal requests: `queries` new tokens at the end of `context`; window 0 is none."""

    reqs: int
    queries: int
    context: int
    window: int = 0
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        window = f" window={self.window}" if self.window else ""
        heads = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        return f"{self.reqs} x {self.queries} of {self.context}{window} {heads} {dtype}"

    def visible(self, query: int) -> tuple[int, int]:
        """Keys [low, high) that a request's new token `query` sees."""
        high = self.context - self.queries + query + 1
        return (max(0, high - self.window) if self.window else 0), high


SHAPES = {
    "cuda": [
        *[Shape(1, 1, context) for context in (256, 1024, 4096, 16384, 32768)],
        *[Shape(reqs, 1, 16384 // reqs) for reqs in (2, 4, 8, 16, 32, 64, 128)],  # 67 MB each
        *[Shape(reqs, 1, 600) for reqs in (8, 16, 64)],  # decode after prompts of 512
        Shape(8, 1, 8192),
        *[Shape(64, 1, context) for context in (512, 4096)],
        Shape(64, 1, 4096, window=512),
        Shape(64, 1, 512, dtype=torch.float16),
        *[Shape(64, 1, 512, heads=heads, kv_heads=8) for heads in (16, 40, 64)],
        Shape(64, 1, 1024, heads=28, kv_heads=4),
        Shape(16, 1, 1024, heads=9, kv_heads=3, head_dim=64),
        Shape(64, 1, 2048, heads=9, kv_heads=3, head_dim=64),
        Shape(64, 1, 512, heads=32, kv_heads=8, head_dim=64),
        *[Shape(64, 1, context, heads=14, kv_heads=2, head_dim=64) for context in (2048, 4096)],
        Shape(66, 1, 2048, heads=14, kv_heads=2, head_dim=64),
        *[Shape(reqs, 1, 1024, heads=14, kv_heads=2, head_dim=64) for reqs in (128, 132)],
        *[Shape(16, 1, 2048, heads=heads, kv_heads=8, head_dim=64) for heads in (32, 56)],
        *[Shape(16, 1, context) for context in (2048, 8192)],
        Shape(16, 1, 4096, heads=8, kv_heads=4, head_dim=256),
        Shape(64, 1, 2048, heads=4, kv_heads=1, head_dim=256),
        *[Shape(reqs, 5, 8192) for reqs in (1, 8)],
        Shape(64, 5, 600),
        Shape(1, 16, 8192),
        Shape(1, 4096, 4096),
        Shape(8, 512, 512),
        Shape(1, 512, 8192),
        Shape(1, 4096, 4096, window=512),
    ],
    "cpu": [
        *[Shape(1, 1, context, 0, 9, 3, 64) for context in (64, 512, 2048)],
        Shape(4, 1, 512, 0, 9, 3, 64),
        Shape(1, 512, 512, 0, 9, 3, 64),
        Shape(1, 128, 1024, 0, 9, 3, 64),
        Shape(1, 1, 2048, 512, 4, 1, 256),
    ],
}


@dataclass(frozen=True)
class Inputs:
    """Queries (tokens, heads, head_dim), caches and batch."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: Batch

    def entries(self, cache: Tensor) -> Tensor:
        """Every request's cache entries, (reqs, context, kv_heads, head_dim)."""
        context = self.batch.max_seq_len
        blocks = self.batch.block_tables[0][:, : -(-context // BLOCK_SIZE)].long()
        return cache[blocks].flatten(1, 2)[:, :context]


def make_batch(shape: Shape, tables: Tensor) -> Batch:
    """A batch of equal requests; tables: (reqs, blocks) int32."""
    int32 = {"dtype": torch.int32, "device": tables.device}
    num_tokens = shape.reqs * shape.queries
    starts = torch.arange(shape.reqs + 1, **int32) * shape.queries
    positions = torch.arange(shape.context - shape.queries, shape.context, **int32)
    slots = torch.zeros((1, num_tokens), dtype=torch.int64, device=tables.device)
    return Batch(
        input_ids=torch.zeros(num_tokens, **int32),
        positions=positions.repeat(shape.reqs),
        cu_seqlens_q=starts,
        seq_lens=torch.full((shape.reqs,), shape.context, **int32),
        rows=torch.arange(shape.reqs, **int32),
        logits_rows=starts[1:] - 1,
        slot_mapping=slots,
        block_tables=tables.unsqueeze(0),
        query_lens=(shape.queries,) * shape.reqs,
        context_lens=(shape.context,) * shape.reqs,
        num_tokens=num_tokens,
        num_reqs=shape.reqs,
        max_query_len=shape.queries,
        max_seq_len=shape.context,
    )


def make_inputs(shape: Shape, seed: int, device: torch.device) -> Inputs:
    """Random entries in blocks of random order."""
    generator = torch.Generator(device).manual_seed(seed)
    per_request = -(-shape.context // BLOCK_SIZE)
    num_blocks = 1 + shape.reqs * per_request

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(shape.dtype)

    order = 1 + torch.randperm(num_blocks - 1, generator=generator, device=device)
    batch = make_batch(shape, order.view(shape.reqs, per_request).int())
    q = normal(batch.num_tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    cache = (num_blocks, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    return Inputs(q[:, : shape.heads], normal(*cache), normal(*cache), batch)


def make_check(shape: Shape) -> Callable[[Inputs], float]:
    """Compare a few tokens with the oracle: each as the only query of the keys up to it."""

    def check(inputs: Inputs) -> float:
        out = decode_attention(
            inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, 0.1, window=shape.window
        )
        keys, values = inputs.entries(inputs.k_cache), inputs.entries(inputs.v_cache)
        worst = 0.0
        for request in {0, shape.reqs - 1}:
            for query in {0, shape.queries // 2, shape.queries - 1}:
                _, high = shape.visible(query)
                token = request * shape.queries + query
                expected = oracle.decode_attention(
                    inputs.q[token : token + 1].cpu(),
                    [keys[request, :high].cpu()],
                    [values[request, :high].cpu()],
                    [1],
                    0.1,
                    shape.window,
                )
                error = relative_error(out[token : token + 1], expected)
                worst = error if not error <= worst else worst  # keeps a NaN
        return worst

    return check


def make_peer(shape: Shape) -> Callable[[tuple[Tensor, Tensor, Tensor]], Tensor]:
    """Attention on contiguous (reqs, heads, tokens, head_dim) tensors."""

    def peer(ready: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        q, k, v = ready
        is_causal = shape.queries > 1
        return scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=0.1, enable_gqa=is_causal
        )

    return peer


def make_ready(shape: Shape, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of the peer: contiguous, cut to the window; the heads of a group as queries."""
    low, high = shape.visible(shape.queries - 1)
    low = low if shape.queries == 1 else 0
    k, v = (
        inputs.entries(cache)[:, low:high].transpose(1, 2).contiguous()
        for cache in (inputs.k_cache, inputs.v_cache)
    )
    if shape.queries == 1:
        q = inputs.q.reshape(shape.reqs, shape.kv_heads, -1, shape.head_dim)
    else:
        q = inputs.q.unflatten(0, (shape.reqs, shape.queries)).transpose(1, 2).contiguous()
    return q, k, v


def make_case(shape: Shape, device: torch.device) -> Case:
    def make(seed: int) -> tuple[Inputs, tuple[Tensor, Tensor, Tensor]]:
        inputs = make_inputs(shape, seed, device)
        return inputs, make_ready(shape, inputs)

    def run(pair: tuple[Inputs, object]) -> Tensor:
        inputs = pair[0]
        return decode_attention(
            inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, 0.1, window=shape.window
        )

    ranges = [shape.visible(query) for query in range(shape.queries)]
    seen = shape.reqs * (ranges[-1][1] - ranges[0][0])
    pairs = shape.reqs * sum(high - low for low, high in ranges)
    tokens = shape.reqs * shape.queries
    check, peer = make_check(shape), make_peer(shape)
    # PyTorch's causal mask is that of a whole prompt, without a window.
    has_peer = shape.queries == 1 or (shape.queries == shape.context and not shape.window)
    return Case(
        name=shape.name,
        make=make,
        run=run,
        check=lambda pair: check(pair[0]),
        tolerance=7e-3,  # weights and result are rounded to bfloat16
        num_bytes=4 * shape.head_dim * (seen * shape.kv_heads + tokens * shape.heads),
        flops=4 * pairs * shape.heads * shape.head_dim,
        peer=(lambda pair: peer(pair[1])) if has_peer else None,
        peer_name="scaled_dot_product_attention on contiguous keys" if has_peer else "",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per batch."""
    for shape in SHAPES[device.type]:
        yield make_case(shape, device)


def run() -> None:
    arguments = parse_cases(__doc__, seconds=0.2).parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    bench_chosen(arguments, cases(device), device)


if __name__ == "__main__":
    run()
