"""Verification of drafts against reading the logits of their slots once, beside argmax.

    python -m benchmarks.verify_accept --device cuda --out verify_accept.json

Floor: each logit of a slot in use is read once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main
from tiercel.ops.sample_tokens import SampleRows
from tiercel.ops.verify_accept import DraftRows, Verified, verify_accept
from tiercel.reference import verify_accept as oracle

# Each is: rows, drafts of each, vocabulary, temperature.
SHAPES = {
    "cuda": [
        (rows, most, vocab, temperature)
        for rows, vocab in ((1, 49_152), (1, 151_936), (16, 151_936), (64, 151_936))
        for most in (1, 5, 8)
        for temperature in (0.0, 1.0)
    ],
    "cpu": [(1, 5, 49_152, 0.0), (4, 5, 49_152, 1.0)],
}


@dataclass(frozen=True)
class Inputs:
    """Logits of all slots, and the rows that they extend."""

    logits: Tensor
    starts: Tensor
    rows: Tensor
    num_drafts: Tensor
    state: SampleRows
    drafts: DraftRows
    is_banned: Tensor
    theta: Tensor


def run(inputs: Inputs) -> Tensor:
    inputs.state.num_tokens.zero_()  # as it stood: the op raises it
    return verify_accept(
        inputs.logits,
        inputs.starts,
        inputs.rows,
        inputs.num_drafts,
        inputs.state,
        inputs.drafts,
        inputs.is_banned,
        inputs.theta,
    ).table


def check(inputs: Inputs) -> float:
    """The share of wrong counts and tokens, of the first rows."""
    result = Verified(run(inputs).cpu())
    most, wrong = inputs.drafts.draft_ids.shape[1] - 1, 0
    count = min(2, len(result.table))
    for r in range(count):
        row = oracle.Row(
            inputs.logits[r * (1 + most) : (r + 1) * (1 + most)].tolist(),
            inputs.drafts.draft_ids[r, 1:].tolist(),
            float(inputs.state.temperature[r]),
            int(inputs.state.key[r]),
            0,
        )
        tokens, _ = oracle.verify_accept(row, set())
        wrong += result.token_ids[r, : int(result.num_new[r])].tolist() != tokens
    return wrong / count


def make_case(rows: int, most: int, vocab: int, temperature: float, device: torch.device) -> Case:
    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        width, size = 1 + most, rows + 1
        logits = torch.randn((rows * width, vocab), generator=generator, device=device) * 3
        ints = {"dtype": torch.int32, "device": device}
        ids = torch.randint(0, vocab, (size, width), generator=generator, **ints)
        for i in range(most):  # right drafts, so that all slots count
            at = torch.arange(rows, device=device) * width + i
            logits[at, ids[:-1, 1 + i].long()] = 60.0
        return Inputs(
            logits,
            torch.arange(rows + 1, **ints) * width,
            torch.arange(rows, **ints),
            torch.full((rows,), most, **ints),
            SampleRows(
                torch.zeros((size, 64), **ints),
                torch.zeros(size, **ints),
                torch.full((size,), temperature, device=device),
                torch.randint(1, 2**62, (size,), generator=generator, device=device),
            ),
            DraftRows(
                ids,
                torch.zeros(size, **ints),
                torch.full((size,), most, **ints),
                torch.zeros(size, **ints),
                torch.full((size,), 0.6, device=device),
                torch.zeros(size, **ints),
            ),
            torch.zeros(vocab, dtype=torch.uint8, device=device),
            torch.full((1,), 0.05, device=device),
        )

    return Case(
        name=f"rows={rows} drafts={most} vocab={vocab} temperature={temperature}",
        make=make,
        run=run,
        check=check,
        tolerance=0.0,
        num_bytes=rows * (1 + most) * vocab * 4,
        peer=lambda inputs: inputs.logits.argmax(dim=1),
        peer_name="argmax",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape; bytes moved define the floor."""
    for shape in SHAPES[device.type]:
        yield make_case(*shape, device)


if __name__ == "__main__":
    main(__doc__, cases)
