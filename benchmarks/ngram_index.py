"""One step of the n-gram index at any length of the text, beside the search through all of it.

    python -m benchmarks.ngram_index --device cuda --out benchmarks/results/ngram_index_h200.json

Every call is preceded by a node that appends 4 tokens to each row, since a step without new tokens
inserts nothing; its time, about 1 us, is part of the figures, of the peer's too. Floor: per row the
new tokens, and per window size a slot and the tokens at its place, in sectors of 32 bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main
from tiercel.ops.ngram_index import (
    NgramIndex,
    NgramTexts,
    extend_ngram_index,
    make_ngram_index,
    ngram_index,
)
from tiercel.ops.ngram_match import make_ngram_workspace, ngram_match

SIZES, MAX_DRAFTS, NEW_TOKENS, VOCAB = 3, 10, 4, 30_000
ROOM = 1 << 15  # generated tokens: more than all calls append
THRESHOLD = 1 << 20
# (rows, prompt tokens)
SHAPES = {
    "cuda": [(1, 4096), (32, 4096), (256, 4096), (256, 32768), (64, 131072)],
    "cpu": [(4, 4096)],
}


@dataclass(frozen=True)
class Inputs:
    """Texts, their index, and a workspace."""

    texts: NgramTexts
    index: NgramIndex
    workspace: Tensor


def make_inputs(rows: int, length: int, device: torch.device, seed: int) -> Inputs:
    """Random texts; the prompt is in the index."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (rows, length + ROOM)
    tokens = torch.randint(VOCAB, shape, generator=generator, device=device, dtype=torch.int32)

    def full(value: int) -> Tensor:
        return torch.full((rows,), value, dtype=torch.int32, device=device)

    texts = NgramTexts(
        input_ids=tokens,
        input_ids_len=full(length),
        token_ids_all=tokens,
        prompt_lens=full(length),
        step_idx=full(SIZES),
        draft_token_num=full(MAX_DRAFTS),
        draft_tokens=torch.zeros(rows, 1 + MAX_DRAFTS, dtype=torch.int32, device=device),
        seq_lens_this_time=full(1),
        seq_lens_encoder=full(0),
        seq_lens_decoder=full(1),
        max_dec_len=full(1 << 20),
    )
    index = make_ngram_index(rows, shape[1], device, max_ngram_size=SIZES)
    workspace = make_ngram_workspace(rows, device)
    extend_ngram_index(index, texts, workspace=workspace)
    return Inputs(texts, index, workspace)


def run(inputs: Inputs) -> None:
    inputs.texts.step_idx.add_(NEW_TOKENS)
    ngram_index(inputs.index, inputs.texts, threshold=THRESHOLD, workspace=inputs.workspace)


def search(inputs: Inputs) -> None:
    """The same drafts from the whole text."""
    texts = inputs.texts
    texts.step_idx.add_(NEW_TOKENS)
    ngram_match(
        texts.input_ids,
        texts.input_ids_len,
        texts.token_ids_all,
        texts.prompt_lens,
        texts.step_idx,
        texts.draft_token_num,
        texts.draft_tokens,
        texts.seq_lens_this_time,
        texts.seq_lens_encoder,
        texts.seq_lens_decoder,
        texts.max_dec_len,
        SIZES,
        MAX_DRAFTS,
        threshold=THRESHOLD,
        convention="count",
        workspace=inputs.workspace,
    )


def check(inputs: Inputs) -> float:
    """0 where 20 steps have the drafts of the search, else infinity."""
    texts = inputs.texts
    for _ in range(20):
        results = []
        for way in (run, search):
            texts.draft_tokens.zero_()
            way(inputs)
            texts.step_idx.sub_(NEW_TOKENS)
            results.append((texts.draft_tokens.tolist(), texts.seq_lens_this_time.tolist()))
        texts.step_idx.add_(NEW_TOKENS)
        if results[0] != results[1]:
            return float("inf")
    return 0.0


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape."""
    for rows, length in SHAPES[device.type]:
        sectors = 1 + SIZES * (NEW_TOKENS + 2)
        yield Case(
            name=f"rows={rows} prompt={length} new tokens={NEW_TOKENS}",
            make=lambda seed, rows=rows, length=length: make_inputs(rows, length, device, seed),
            run=run,
            check=check,
            tolerance=0.0,
            num_bytes=rows * 32 * sectors,
            max_sets=2,  # every call reads other slots
            peer=search,
            peer_name="ngram_match",
        )


if __name__ == "__main__":
    main(__doc__, cases)
