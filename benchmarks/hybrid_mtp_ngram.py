"""N-gram drafts after those of an MTP head against the floor in bytes, beside FastDeploy's kernels.

    out=benchmarks/results/hybrid_mtp_ngram_h200.json
    python -m benchmarks.hybrid_mtp_ngram --device cuda --out $out

Inputs and peer: see ngram_match.py. A call changes the lengths that it reads, so each is preceded
by a node that sets them back; its time, about 1 us, is part of the figures.
"""

from collections.abc import Iterator

import torch

from benchmarks.ngram_match import (
    MAX_DRAFTS,
    MAX_NGRAM_SIZE,
    PEER,
    STEPS,
    Inputs,
    expected_drafts,
    make_inputs,
)
from benchmarks.op_timing import Case, main
from tiercel.ops.hybrid_mtp_ngram import hybrid_mtp_ngram

# (rows, prompt tokens, threshold, hit): microseconds of the peer, None where it was not measured
GROUPS = {
    (16, 16384, 1024, "low_input"): None,
    (32, 16384, 8192, "low_input"): None,
    (512, 16384, 8192, "low_input"): None,
    (32, 512, 1024, "low_input"): 9.5,
    (16, 131072, 1024, "low_input"): 68.5,
    (256, 131072, 8192, "low_input"): 138.3,
    (256, 131072, 8192, "none"): 380.0,
}
CPU_GROUPS = ((32, 512, 1024, "low_input"),)


def make_case(
    shape: tuple[int, int, int, str],
    peer_us: float | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    rows, length, threshold, hit = shape

    def run(inputs: Inputs) -> None:
        inputs.seq_lens_this_time.copy_(inputs.seq_lens_decoder)  # ones
        hybrid_mtp_ngram(
            inputs.input_ids,
            inputs.input_ids_len,
            inputs.token_ids_all,
            inputs.step_idx,
            inputs.draft_token_num,
            inputs.draft_tokens,
            inputs.seq_lens_this_time,
            inputs.seq_lens_decoder,
            inputs.max_dec_len,
            MAX_NGRAM_SIZE,
            1,
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

    tokens = rows * (length + STEPS + MAX_DRAFTS)
    return Case(
        name=f"{rows} x {length} T={threshold} {hit} {str(dtype).removeprefix('torch.')}",
        make=lambda seed: make_inputs(rows, length, hit, dtype, device, seed),
        run=run,
        check=check,
        tolerance=0.0,
        num_bytes=tokens * dtype.itemsize + rows * (3 * 8 + 3 * 4),
        peer_name=PEER if peer_us else "",
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
