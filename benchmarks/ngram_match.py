"""Drafting from the row's own text against the floor in bytes, beside FastDeploy's CUDA kernels.

    python -m benchmarks.ngram_match --device cuda --out benchmarks/results/ngram_match_h200.json

Inputs are those of FastDeploy pull requests 6960 and 7136: windows of up to 3 tokens, 10 drafts,
tokens random in [10, 500), 20 generated tokens of which the last three are the query; its only
other copy is near the start (high) or the end (low) of the prompt or of the generated text (pre),
or nowhere. Their `high_pre` does not fit 20 generated tokens, so that it is in truth `none`; here
it has 40.

Floor: prompts and generated tokens read once. The peer's figures were measured on an H200 as graph
replays on cold buffers with int64 tokens, its only type; rows with int32 tokens stand beside them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main
from tiercel.ops.ngram_match import make_ngram_workspace, ngram_match

MAX_NGRAM_SIZE, MAX_DRAFTS, STEPS = 3, 10, 20
QUERY, FOLLOWER = 1001, 2001  # first tokens of the query and of the text after its copy
PEER = "FastDeploy pull request 7136, int64, cold graph replay on an H200"
# (rows, prompt tokens, threshold, hit): microseconds of the peer
GROUPS = {
    (16, 1024, 512, "low_input"): 8.1,
    (16, 4096, 512, "low_input"): 9.6,
    (16, 16384, 512, "low_input"): 15.3,
    (16, 65536, 512, "low_input"): 37.6,
    (16, 131072, 512, "low_input"): 66.7,
    (1, 16384, 8192, "low_input"): 13.8,
    (8, 16384, 8192, "low_input"): 14.8,
    (32, 16384, 8192, "low_input"): 15.7,
    (128, 16384, 8192, "low_input"): 16.4,
    (512, 16384, 8192, "low_input"): 35.0,
    (16, 32768, 512, "high_input"): 22.7,
    (16, 32768, 512, "high_pre"): 23.3,
    (16, 32768, 512, "low_input"): 22.8,
    (16, 32768, 512, "low_pre"): 23.6,
    (16, 32768, 512, "none"): 36.0,
    (8, 32768, 16, "low_input"): 21.4,
    (8, 32768, 32, "low_input"): 21.7,
    (8, 32768, 64, "low_input"): 22.3,
    (8, 32768, 128, "low_input"): 22.2,
    (8, 32768, 256, "low_input"): 22.2,
    (128, 32768, 16, "low_input"): 22.2,
    (128, 32768, 32, "low_input"): 22.2,
    (128, 32768, 64, "low_input"): 22.2,
    (128, 32768, 128, "low_input"): 22.2,
    (128, 32768, 256, "low_input"): 23.7,
    (32, 512, 128, "low_input"): 7.7,
    (128, 512, 8192, "low_input"): 8.7,
    (256, 512, 8192, "low_input"): 9.7,
    (256, 131072, 8192, "low_input"): 84.0,
    (256, 131072, 16384, "low_input"): 84.0,
    (256, 131072, 8192, "none"): 225.4,
    (256, 131072, 8192, "high_input"): 83.4,
}
CPU_GROUPS = ((16, 1024, 512, "low_input"), (32, 512, 128, "low_input"), (16, 16384, 512, "none"))


@dataclass(frozen=True)
class Inputs:
    """Arguments of the drafters, and a workspace."""

    input_ids: Tensor
    input_ids_len: Tensor
    token_ids_all: Tensor
    prompt_lens: Tensor
    step_idx: Tensor
    draft_token_num: Tensor
    draft_tokens: Tensor
    seq_lens_this_time: Tensor
    seq_lens_encoder: Tensor
    seq_lens_decoder: Tensor
    max_dec_len: Tensor
    workspace: Tensor


def make_inputs(
    rows: int, length: int, hit: str, dtype: torch.dtype, device: torch.device, seed: int
) -> Inputs:
    """Texts with one copy of the query, as the module says."""
    generator = torch.Generator(device).manual_seed(seed)

    def text(width: int) -> Tensor:
        tokens = torch.randint(10, 500, (rows, width), generator=generator, device=device)
        return tokens.to(dtype)

    def full(value: int, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    steps = 40 if hit == "high_pre" else STEPS
    prompt, generated = text(length), text(length + 64)
    copy = torch.arange(MAX_NGRAM_SIZE + MAX_DRAFTS, device=device)
    copy += torch.where(copy < MAX_NGRAM_SIZE, QUERY, FOLLOWER - MAX_NGRAM_SIZE)
    tokens, place = {
        "high_input": (prompt, 5),
        "low_input": (prompt, length - 18),
        "high_pre": (generated, 5),
        "low_pre": (generated, 2),
        "none": (prompt, None),
    }[hit]
    if place is not None:
        tokens[:, place : place + len(copy)] = copy.to(dtype)
    generated[:, steps - 2 : steps + 1] = copy[:MAX_NGRAM_SIZE].to(dtype)
    drafts = torch.zeros(rows, 1 + MAX_DRAFTS, dtype=dtype, device=device)
    drafts[:, 0] = QUERY + MAX_NGRAM_SIZE - 1
    return Inputs(
        input_ids=prompt,
        input_ids_len=full(length, torch.int64),
        token_ids_all=generated,
        prompt_lens=full(0, torch.int64),
        step_idx=full(steps, torch.int64),
        draft_token_num=full(MAX_DRAFTS, torch.int32),
        draft_tokens=drafts,
        seq_lens_this_time=full(1, torch.int32),
        seq_lens_encoder=full(0, torch.int32),
        seq_lens_decoder=full(1, torch.int32),
        max_dec_len=full(1 << 20, torch.int64),
        workspace=make_ngram_workspace(rows, device),
    )


def expected_drafts(rows: int, hit: str, threshold: int) -> tuple[list[list[int]], list[int]]:
    """Rows after slot 0, and lengths, by the rule for rows that all find the same."""
    room, drafts, lens = threshold - rows, [], []
    for _ in range(rows):
        count = min(MAX_DRAFTS, room) if room >= 2 and hit != "none" else 0
        room -= count
        copied = [FOLLOWER + slot if slot < count else 0 for slot in range(MAX_DRAFTS)]
        drafts.append(copied)
        lens.append(1 + count)
    return drafts, lens


def make_case(
    shape: tuple[int, int, int, str], peer_us: float, dtype: torch.dtype, device: torch.device
) -> Case:
    rows, length, threshold, hit = shape

    def run(inputs: Inputs) -> None:
        ngram_match(
            inputs.input_ids,
            inputs.input_ids_len,
            inputs.token_ids_all,
            inputs.prompt_lens,
            inputs.step_idx,
            inputs.draft_token_num,
            inputs.draft_tokens,
            inputs.seq_lens_this_time,
            inputs.seq_lens_encoder,
            inputs.seq_lens_decoder,
            inputs.max_dec_len,
            MAX_NGRAM_SIZE,
            MAX_DRAFTS,
            threshold=threshold,
            workspace=inputs.workspace,
        )

    def check(inputs: Inputs) -> float:
        """0 where every draft and length is right, else infinity."""
        run(inputs)
        drafts, lens = expected_drafts(rows, hit, threshold)
        same = inputs.draft_tokens[:, 1:].tolist() == drafts
        return 0.0 if same and inputs.seq_lens_this_time.tolist() == lens else float("inf")

    # A batch that the budget kills before its first row needs no text.
    searched = rows * (length + STEPS) if threshold - rows >= 2 else 0
    return Case(
        name=f"{rows} x {length} T={threshold} {hit} {str(dtype).removeprefix('torch.')}",
        make=lambda seed: make_inputs(rows, length, hit, dtype, device, seed),
        run=run,
        check=check,
        tolerance=0.0,
        num_bytes=searched * dtype.itemsize + rows * (4 * 8 + 4 * 4 + MAX_DRAFTS * dtype.itemsize),
        peer_name=PEER,
        peer_us=peer_us if device.type == "cuda" else None,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape and token type; bytes read define the floor."""
    for shape, peer_us in GROUPS.items():
        if device.type == "cuda" or shape in CPU_GROUPS:
            for dtype in (torch.int32, torch.int64):
                yield make_case(shape, peer_us, dtype, device)


if __name__ == "__main__":
    main(__doc__, cases)
