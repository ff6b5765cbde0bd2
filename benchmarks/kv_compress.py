"""The compressors of DeepSeek-V4 against their floor in bytes.

    python -m benchmarks.kv_compress --device cuda --out FILE.json

Floor: the kv and gate inputs of each entry's terms are read once, 4 bytes each, and the entry is
written once. A prefill reads rows of its step, a decode step rows of the cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.models.config import RopeConfig
from tiercel.models.rope import rope_table
from tiercel.ops.kv_compress import Terms, completing_tokens, compress_terms, kv_compress
from tiercel.reference import kv_compress as oracle
from tiercel.reference import latent_rope as rope_oracle

EPS, ROTARY, BLOCK, CONTEXT = 1e-6, 64, 128, 8192
# Tokens per entry, overlap, stored rows of a block, channels; equal in Flash and Pro.
KINDS = {
    "CSA": (4, True, 32, 512),
    "indexer": (4, True, 32, 128),
    "HCA": (128, False, 128, 512),
}
PREFILL = {"cuda": 4096, "cpu": 256}
DECODE = {"cuda": (1, 64), "cpu": (1, 4)}


@dataclass(frozen=True)
class Inputs:
    """Inputs of the step (T, channels) and of the cache, float32, and the norm's weight."""

    kv: Tensor
    gate: Tensor
    stored_kv: Tensor
    stored_gate: Tensor
    weight: Tensor


def plan(kind: str, num_seqs: int, count: int, last: int, device: torch.device) -> Terms:
    """Terms of sequences whose `count` tokens end at position `last`."""
    ratio, has_overlap, rows, _ = KINDS[kind]
    columns = -(-(last + 1) // BLOCK)
    positions = torch.arange(last + 1 - count, last + 1, device=device).repeat(num_seqs)
    tokens = completing_tokens(positions, ratio=ratio, capacity=num_seqs * (count // ratio or 1))
    return compress_terms(
        tokens,
        positions,
        torch.arange(num_seqs, device=device).repeat_interleave(count),
        torch.arange(0, num_seqs * count + 1, count, device=device),
        torch.arange(num_seqs * columns, device=device).view(num_seqs, columns),
        ratio=ratio,
        has_overlap=has_overlap,
        block_size=BLOCK,
        rows_per_block=rows,
    )


def make_case(kind: str, num_seqs: int, count: int, last: int, table: Tensor) -> Case:
    device = table.device
    ratio, has_overlap, rows, width = KINDS[kind]
    channels = 2 * width if has_overlap else width
    num_blocks = num_seqs * -(-(last + 1) // BLOCK)
    terms = plan(kind, num_seqs, count, last, device)

    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        shapes = (
            [(num_seqs * count, channels)] * 2 + [(num_blocks, rows, channels)] * 2 + [(width,)]
        )
        return Inputs(*(torch.randn(*s, generator=generator, device=device) for s in shapes))

    def run(x: Inputs) -> Tensor:
        return kv_compress(
            x.kv, x.gate, x.stored_kv, x.stored_gate, terms, x.weight, table, ratio=ratio, eps=EPS
        )

    def check(x: Inputs) -> float:
        """Compare the last entry, in a sequence of its terms alone."""
        entry = int(terms.entries[-1])
        new, old = terms.fresh[-1], terms.stored[-1]
        kv, gate = (
            torch.where((new >= 0)[:, None], fresh[new], stored.flatten(0, 1)[old]).cpu()
            for fresh, stored in ((x.kv, x.stored_kv), (x.gate, x.stored_gate))
        )
        sums = oracle.kv_compress(kv, gate, width, ratio)[-1:]
        angles = rope_oracle.frequencies(ROTARY, 160000.0, 16.0, 65536)
        position = torch.tensor([entry * ratio])
        expected = rope_oracle.latent_rope(sums, position, angles, EPS, x.weight.cpu())
        return relative_error(run(x)[-1:].cpu(), expected)

    num_entries = terms.entries.shape[0]
    num_terms = terms.fresh.shape[1]
    reads = min(num_entries * num_terms * width, num_entries * ratio * channels)
    step = "prefill" if count > 1 else "decode"
    return Case(
        name=f"{kind} {step} seqs={num_seqs} tokens={count}",
        make=make,
        run=run,
        check=check,
        tolerance=1e-4,
        num_bytes=8 * (reads if count > 1 else num_entries * num_terms * width)
        + 4 * num_entries * width,
        max_sets=8,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield prefill and decode of each compressor; bytes moved define the floor."""
    rope = RopeConfig(160000.0, ROTARY, "yarn", 16.0, 65536, attention_factor=1.0)
    table = rope_table(rope, CONTEXT).to(device)
    for kind in KINDS:
        yield make_case(kind, 1, PREFILL[device.type], PREFILL[device.type] - 1, table)
        for num_seqs in DECODE[device.type]:
            yield make_case(kind, num_seqs, 1, 1023, table)


if __name__ == "__main__":
    main(__doc__, cases)
