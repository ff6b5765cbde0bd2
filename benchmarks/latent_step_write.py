"""What a step adds to the cache of one layer, and its queries, against its bytes and single ops.

    python -m benchmarks.latent_step_write --device cuda --out FILE.json

Floor: vectors, queries and inputs are read and written once, and so are the terms and entries that
complete.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from benchmarks.step_index import KINDS, make_batch
from tiercel.models.config import RopeConfig
from tiercel.models.rope import rope_table
from tiercel.ops import latent_step_write as op
from tiercel.ops.block_quantize import decode_kv_entries
from tiercel.ops.latent_step_write import (
    MOST_QUERY_TOKENS,
    CompressedRows,
    LatentQueries,
    LatentVectors,
    latent_step_write,
)
from tiercel.ops.step_index_torch import CompressKind, StepIndex, index_step
from tiercel.reference import latent_rope as rope_oracle
from tiercel.reference import latent_step_write as oracle

EPS, ROTARY, WIDTH, KEY, BLOCK, CONTEXT = 1e-6, 64, 512, 128, 128, 8192
# Requests, new tokens, and the position of the first: 3 mod 4 and 127 mod 128 complete an entry.
SHAPES = {
    "cuda": [(1, 1, 1022), (1, 1, 1027), (1, 1, 1023), (64, 1, 1023), (1, 4096, 0)],
    "cpu": [(1, 1, 1023), (2, 3, 1)],
}
NAMES = {4: "CSA", 128: "HCA"}
HEADS = 64  # of queries and of the indexer, of Flash


@dataclass(frozen=True)
class Inputs:
    """Arguments of the op, and its step."""

    vectors: LatentVectors
    compressors: list[CompressedRows]
    step: StepIndex
    queries: list[LatentQueries]


def make_case(kind: CompressKind, shape: tuple[int, int, int], table: Tensor) -> Case:
    device, (num_reqs, count, start) = table.device, shape
    num_tokens = num_reqs * count
    has_queries = num_tokens <= MOST_QUERY_TOKENS
    widths = (WIDTH, KEY) if kind.has_overlap else (WIDTH,)
    blocks = 1 + num_reqs * (-(-(start + count) // BLOCK) + 1)

    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)

        def sample(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device)

        def planes(per_block: int, data: int, scales: int) -> tuple[Tensor, Tensor]:
            pool = torch.zeros(blocks, per_block, data + scales, dtype=torch.uint8, device=device)
            return pool[..., :data], pool[..., data:]

        batch = make_batch(num_reqs, count, blocks, device, seed, start)
        step = index_step(batch, BLOCK, BLOCK, 2, (kind,))
        window = planes(BLOCK, WIDTH + ROTARY, 8)
        vectors = LatentVectors(
            *(sample(num_tokens, WIDTH).bfloat16(), step.positions, table, sample(WIDTH), EPS),
            *(window, step.kv_slots),
        )
        rows = []
        for width in widths:
            channels = width * (2 if kind.has_overlap else 1)
            inputs = sample(num_tokens, 2 * channels)
            stored = sample(blocks, kind.rows_per_block, 2, channels)
            sizes = (KEY // 2, KEY // 32) if width == KEY else (WIDTH + ROTARY, 8)
            rows.append(
                CompressedRows(
                    *((inputs[:, :channels], inputs[:, channels:]), sample(kind.ratio, channels)),
                    *((stored[:, :, 0], stored[:, :, 1]), sample(width), EPS, table),
                    *(planes(BLOCK // kind.ratio, *sizes), width == KEY),
                )
            )
        heads = sample(num_tokens, HEADS, WIDTH).bfloat16()
        queries = [LatentQueries(heads, table, EPS, False, torch.bfloat16)]
        if kind.has_overlap:
            index = sample(num_tokens, HEADS, KEY).bfloat16()
            queries.append(LatentQueries(index, table, None, True, torch.float32))
        return Inputs(vectors, rows, step, queries if has_queries else [])

    def run(x: Inputs) -> None:
        step = x.step.compressed[kind.ratio]
        latent_step_write(x.vectors, ROTARY, x.compressors, step, x.queries)

    def peer(x: Inputs) -> None:
        rest = (x.compressors, x.step.compressed[kind.ratio])
        op._write_one_by_one(x.vectors, ROTARY, *rest)
        for query in x.queries:
            query.turned(x.vectors.positions)

    def check(x: Inputs) -> float:
        """The vector of the last token."""
        run(x)
        cache, scales = x.vectors.planes
        assert scales is not None
        slot = int(x.step.kv_slots[-1])
        place = (slot // BLOCK, slot % BLOCK)
        found = decode_kv_entries(cache[place][None], ROTARY, scales[place][None]).cpu()
        angles = rope_oracle.frequencies(ROTARY, 160000.0, 16.0, 65536)
        last = (x.vectors.x[-1:].cpu(), x.step.positions[-1:].cpu())
        expected = oracle.vectors(*last, angles, EPS, x.vectors.weight.cpu())
        return relative_error(found, expected)

    channels = sum(width * (2 if kind.has_overlap else 1) for width in widths)
    completed = num_reqs * ((start + count) // kind.ratio - start // kind.ratio)
    heads = (4 * WIDTH + (6 * KEY if kind.has_overlap else 0)) * HEADS if has_queries else 0
    terms = completed * kind.num_terms * sum(widths) * 8
    return Case(
        name=f"{NAMES[kind.ratio]} requests={num_reqs} new_tokens={count} start={start}",
        make=make,
        run=run,
        check=check,
        tolerance=0.04,  # of E4M3
        num_bytes=num_tokens * (2 * WIDTH + 584 + 16 * channels + heads) + terms + 584 * completed,
        peer=peer,
        peer_name="single ops",
        max_sets=16,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per kind and shape; bytes moved define the floor."""
    rope = RopeConfig(160000.0, ROTARY, "yarn", 16.0, 65536, attention_factor=1.0)
    table = rope_table(rope, CONTEXT).to(device)
    for kind in KINDS:
        for shape in SHAPES[device.type]:
            yield make_case(kind, shape, table)


if __name__ == "__main__":
    main(__doc__, cases)
