"""Sampling rows of logits against reading them once, beside softmax and multinomial.

    python -m benchmarks.sample_tokens --device cuda --out sample_tokens.json

Floor: each logit is read once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main
from tiercel.ops.sample_tokens import SampleRows, sample_tokens
from tiercel.reference import sample_tokens as oracle

# Each is: rows, vocabulary, temperature.
SHAPES = {
    "cuda": [
        (rows, vocab, temperature)
        for rows, vocab in ((1, 49_152), (1, 151_936), (64, 151_936), (256, 151_936))
        for temperature in (0.0, 1.0)
    ],
    "cpu": [(1, 49_152, 0.0), (1, 49_152, 1.0), (16, 49_152, 1.0)],
}


@dataclass(frozen=True)
class Inputs:
    """Logits and the rows that they extend."""

    logits: Tensor
    rows: Tensor
    state: SampleRows
    is_banned: Tensor


def run(inputs: Inputs) -> None:
    inputs.state.num_tokens.zero_()  # as it stood: the op raises it
    sample_tokens(inputs.logits, inputs.rows, inputs.state, inputs.is_banned)


def check(inputs: Inputs) -> float:
    """The share of wrong tokens, of the first rows."""
    inputs.state.num_tokens.zero_()
    found, _ = sample_tokens(inputs.logits, inputs.rows, inputs.state, inputs.is_banned)
    count = min(2, len(found))
    expected = oracle.sample_tokens(
        inputs.logits[:count].cpu(),
        inputs.state.temperature[:count].tolist(),
        inputs.state.key[:count].tolist(),
        [0] * count,
        set(),
    )
    return sum(a != b for a, (b, _) in zip(found.tolist(), expected, strict=False)) / count


def make_case(rows: int, vocab: int, temperature: float, device: torch.device) -> Case:
    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        key = torch.randint(1, 2**62, (rows + 1,), generator=generator, device=device)
        state = SampleRows(
            torch.zeros((rows + 1, 4), dtype=torch.int32, device=device),
            torch.zeros(rows + 1, dtype=torch.int32, device=device),
            torch.full((rows + 1,), temperature, device=device),
            key,
        )
        return Inputs(
            torch.randn((rows, vocab), generator=generator, device=device) * 3,
            torch.arange(rows, dtype=torch.int32, device=device),
            state,
            torch.zeros(vocab, dtype=torch.uint8, device=device),
        )

    def peer(inputs: Inputs) -> None:
        if temperature:
            scaled = inputs.logits / inputs.state.temperature[:-1].unsqueeze(1)
            torch.multinomial(scaled.softmax(dim=1), 1)
        else:
            inputs.logits.argmax(dim=1)

    return Case(
        name=f"rows={rows} vocab={vocab} temperature={temperature}",
        make=make,
        run=run,
        check=check,
        tolerance=0.0,
        num_bytes=rows * vocab * 4,
        peer=peer,
        peer_name="softmax and multinomial" if temperature else "argmax",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape; bytes moved define the floor."""
    for shape in SHAPES[device.type]:
        yield make_case(*shape, device)


if __name__ == "__main__":
    main(__doc__, cases)
