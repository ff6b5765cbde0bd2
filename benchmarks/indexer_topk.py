"""The indexer of DeepSeek-V4 against its floor in bytes and FLOPs.

    python -m benchmarks.indexer_topk --device cuda --out FILE.json

Floor: each sequence's packed keys are read once, 68 bytes an entry, and 2 FLOPs per head, channel
and entry. One token of a decode step per sequence; keys of a prefill are shared by its tokens.
Where both kernels of few tokens run, each is a case of its own too; a choice reads all scores once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.kernels.attention import indexer_scores, indexer_select
from tiercel.ops.block_quantize import decode_index_keys, encode_index_keys, hadamard
from tiercel.ops.indexer_topk import PagedKeys, indexer_topk
from tiercel.reference import indexer_topk as oracle

HEADS, HEAD_DIM, PER_BLOCK = 64, 128, 32
TOPK = {"Flash": 512, "Pro": 1024}
# Tokens, sequences, visible entries; an entry is 4 tokens of context.
SHAPES = {
    "cuda": [
        *[(1, 1, entries) for entries in (2048, 8192, 32768, 262144)],
        *[(64, 64, entries) for entries in (2048, 8192, 32768)],
        (512, 1, 8192),
        (4096, 1, 1024),
        (4096, 1, 8192),
    ],
    "cpu": [(1, 1, 2048), (4, 1, 2048)],
}


@dataclass(frozen=True)
class Inputs:
    """q (T, 64, 128), weights (T, 64), packed keys in blocks, visible (T,)."""

    q: Tensor
    weights: Tensor
    paged: PagedKeys
    visible: Tensor


def make_case(
    model: str, num_tokens: int, num_seqs: int, entries: int, device: torch.device
) -> Case:
    topk, columns = TOPK[model], entries // PER_BLOCK
    has_scores = entries > topk

    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)

        def sample(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        keys = encode_index_keys(sample(num_seqs * columns, PER_BLOCK, HEAD_DIM))
        order = torch.randperm(num_seqs * columns, generator=generator, device=device)
        seq_ids = torch.arange(num_tokens, device=device) % num_seqs
        tables = order.int().view(num_seqs, columns)
        # Planes of their own, as in the cache.
        planes = keys[..., :64].contiguous(), keys[..., 64:].contiguous()
        paged = PagedKeys(*planes, tables, seq_ids)
        visible = torch.full((num_tokens,), entries, device=device)
        q = hadamard(sample(num_tokens, HEADS, HEAD_DIM)).bfloat16()
        return Inputs(q, sample(num_tokens, HEADS), paged, visible)

    def run(inputs: Inputs) -> Tensor:
        return indexer_topk(
            inputs.q, inputs.weights, inputs.paged, inputs.visible, topk=topk, max_entries=entries
        )

    def check(inputs: Inputs) -> float:
        """How far below the oracle's sum of the best scores the choice of the last token is."""
        paged = inputs.paged
        table = paged.block_tables[paged.seq_ids[-1]]
        assert paged.scales is not None
        keys = decode_index_keys(paged.keys[table], paged.scales[table]).flatten(0, 1)
        rows = (inputs.q[-1:].cpu(), inputs.weights[-1:].cpu(), keys.cpu())
        scores = oracle.scores(*rows)[0]
        found = scores[run(inputs)[-1].long().cpu()].sum().item()
        best = scores.sort(descending=True).values[:topk].sum().item()
        return abs(best - found) / abs(best)

    return Case(
        name=f"{model} tokens={num_tokens} seqs={num_seqs} entries={entries}",
        make=make,
        run=run,
        check=check,
        tolerance=1e-5,
        # Entries that are all taken need no scores.
        num_bytes=has_scores * (num_seqs * entries * 68 + num_tokens * 2 * HEADS * HEAD_DIM)
        + 4 * num_tokens * topk,
        flops=has_scores * 2 * num_tokens * entries * HEADS * HEAD_DIM,
        max_sets=16,
    )


def make_parts(case: Case, topk: int, entries: int) -> Iterator[Case]:
    """The scores of a case alone, and the choice alone, by the kernels of few tokens."""

    def make_rows(inputs: Inputs) -> tuple[Tensor, Tensor]:
        num_tokens = inputs.q.shape[0]
        counts = entries, -(-entries // indexer_select.GROUP)
        scores, bests = (inputs.weights.new_empty((num_tokens, count)) for count in counts)
        return scores, bests

    def run_scores(inputs: Inputs) -> Tensor:
        paged, (scores, bests) = inputs.paged, make_rows(inputs)
        assert paged.scales is not None
        indexer_scores.launch_indexer_scores(
            *(inputs.q, inputs.weights, paged.keys, paged.scales),
            *(paged.block_tables, paged.seq_ids, inputs.visible, scores, bests),
        )
        return scores

    def check_scores(inputs: Inputs) -> float:
        paged = inputs.paged
        table = paged.block_tables[paged.seq_ids[-1]]
        assert paged.scales is not None
        keys = decode_index_keys(paged.keys[table], paged.scales[table]).flatten(0, 1)
        rows = (inputs.q[-1:].cpu(), inputs.weights[-1:].cpu(), keys.cpu())
        return relative_error(run_scores(inputs)[-1:].cpu(), oracle.scores(*rows))

    def make_scores(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        visible = case.make(seed).visible
        generator = torch.Generator(visible.device).manual_seed(seed)
        size = len(visible), entries
        scores = torch.randn(size, generator=generator, device=visible.device)
        return scores, scores.view(size[0], -1, indexer_select.GROUP).amax(2), visible

    def run_choice(rows: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        out = torch.empty((len(rows[0]), topk), dtype=torch.int32, device=rows[0].device)
        indexer_select.launch_indexer_select(*rows, out)
        return out

    def check_choice(rows: tuple[Tensor, Tensor, Tensor]) -> float:
        best = torch.topk(rows[0], topk, dim=1).indices.sort(dim=1).values
        return float((run_choice(rows) != best).sum().item())

    num_tokens = case.make(0).q.shape[0]
    num_bytes = case.num_bytes - 4 * num_tokens * topk + 4 * num_tokens * entries
    yield Case(
        name=f"{case.name}, scores alone",
        make=case.make,
        run=run_scores,
        check=check_scores,
        tolerance=1e-4,
        num_bytes=num_bytes,
        flops=case.flops,
        max_sets=case.max_sets,
    )
    yield Case(
        name=f"{case.name}, choice alone",
        make=make_scores,
        run=run_choice,
        check=check_choice,
        tolerance=0.0,
        num_bytes=4 * num_tokens * (entries + topk),
        max_sets=16,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per model and shape; bytes and FLOPs define the floor."""
    for model in TOPK:
        for shape in SHAPES[device.type]:
            num_tokens, _, entries = shape
            case = make_case(model, *shape, device)
            yield case
            is_chosen = not indexer_select.select_refusal(num_tokens, entries, device)
            if device.type == "cuda" and is_chosen and entries > TOPK[model]:
                yield from make_parts(case, TOPK[model], entries)


if __name__ == "__main__":
    main(__doc__, cases)
