"""Candidate configs of the Triton kernel of decode attention, timed: its table is chosen from them.

    python -m benchmarks.decode_attention_sweep --out results/decode_attention_sweep.json

Splits are one choice per head_dim, whatever the batch (kernels/attention/decode_attention.py), so
configs are ranked by the geometric mean of their fractions of the floor over all swept shapes of
that head_dim.
"""

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.common import environment
from benchmarks.decode_attention import BLOCK_SIZE, Inputs, Shape, make_case, make_inputs
from benchmarks.figures import save
from benchmarks.op_timing import (
    Ceilings,
    measure_ceilings,
    num_sets,
    parse,
    relative_error,
    time_inputs,
)
from tiercel.kernels.attention import decode_attention as kernel
from tiercel.kernels.attention.decode_attention import DecodeAttentionConfig
from tiercel.ops.decode_attention import decode_attention

SWEPT = [
    Shape(64, 1, 4096),
    Shape(1, 1, 32768),
    Shape(8, 1, 8192),
    Shape(1, 1, 1024),
    Shape(8, 5, 8192),
    Shape(64, 1, 4096, heads=14, kv_heads=2, head_dim=64),
    Shape(16, 1, 4096, heads=8, kv_heads=4, head_dim=256),
]
# (fine_keys, fine_end, coarse_keys), stages and programs in every combination.
SPLITS = [
    (128, 2048, 512),
    (128, 2048, 256),
    (256, 256, 256),
    (256, 2048, 512),
    (512, 512, 512),
    (256, 4096, 1024),
]
STAGES = (3, 2, 4)
PROGRAMS = (1056, 2112, 4224)
SWEEP_S = 0.1  # of one measurement


def run_config(inputs: Inputs, config: DecodeAttentionConfig) -> Tensor:
    """Run the kernel as the op does for decode steps, with another config."""
    q, batch = inputs.q, inputs.batch
    rows, head_dim = q.shape[0] * q.shape[1], q.shape[2]
    splits = config.num_splits(batch.max_seq_len, batch.max_query_len, 0)
    partials = torch.empty((rows, splits, head_dim), dtype=torch.float32, device=q.device)
    out = torch.empty((q.shape[0], q.shape[1] * head_dim), dtype=q.dtype, device=q.device)
    kernel.launch_decode_attention(
        q,
        inputs.k_cache,
        inputs.v_cache,
        batch.block_tables[0],
        batch.rows,
        batch.cu_seqlens_q,
        batch.seq_lens,
        partials,
        partials.new_empty((rows, splits, 2)),
        out,
        0.1,
        0,
        batch.max_query_len,
        config,
    )
    return out


def candidates(shipped: DecodeAttentionConfig) -> Iterator[DecodeAttentionConfig]:
    """The shipped config, then every combination, then options that matter for some shapes only."""
    yield shipped
    for (fine, end, coarse), stages, programs in itertools.product(SPLITS, STAGES, PROGRAMS):
        yield replace(
            shipped,
            fine_keys=fine,
            fine_end=end,
            coarse_keys=coarse,
            num_stages=stages,
            programs=programs,
        )
    for rows in (16, 32, 64):
        yield replace(shipped, most_rows=rows)
    for splits, cols in itertools.product((16, 32, 64), (16, 32, 64)):
        yield replace(shipped, merge_splits=splits, merge_cols=cols)


def sweep_shape(shape: Shape, device: torch.device, ceilings: Ceilings) -> list[dict[str, Any]]:
    """Time all candidates on one shape, best first; one too large, or wrong, is a row too."""
    case = make_case(shape, device)
    inputs = [make_inputs(shape, seed, device) for seed in range(num_sets(case, device))]
    first = inputs[0]
    expected = decode_attention(first.q, first.k_cache, first.v_cache, first.batch, 0.1)
    floor_us = case.num_bytes / max(ceilings.read_gbps, ceilings.copy_gbps) / 1e3
    rows: list[dict[str, Any]] = []
    for config in candidates(kernel.select_decode_attention(shape.head_dim, 2, BLOCK_SIZE)):
        row: dict[str, Any] = {"name": shape.name, **asdict(config)}
        try:
            error = relative_error(run_config(first, config), expected)
        except OutOfResources as failure:
            rows.append(row | {"failed": str(failure)})
            continue
        if not error <= case.tolerance:
            rows.append(row | {"failed": f"error {error:.2e}"})
            continue
        timing = time_inputs(
            lambda item, config=config: run_config(item, config), inputs, device, SWEEP_S
        )
        fraction = floor_us / timing.median_us
        rows.append(row | {"median_us": timing.median_us, "fraction_of_floor": fraction})
        print(
            f"{shape.name:<34}{describe(config):<66}{timing.median_us:>9.2f} us{fraction:>8.1%}",
            flush=True,
        )
    return sorted(rows, key=lambda row: -row.get("fraction_of_floor", 0.0))


def describe(config: DecodeAttentionConfig) -> str:
    """A config in a line."""
    return (
        f"splits {config.fine_keys}<{config.fine_end}<{config.coarse_keys} "
        f"stages {config.num_stages} programs {config.programs} rows {config.most_rows} "
        f"merge {config.merge_splits}x{config.merge_cols}"
    )


def rank(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Configs by the geometric mean of their fractions over the shapes of a head_dim, best first.

    rows: of one head_dim. A config that failed anywhere is left out.
    """
    names = [field.name for field in fields(DecodeAttentionConfig)]
    fractions: dict[DecodeAttentionConfig, dict[str, float]] = {}
    for row in rows:
        config = DecodeAttentionConfig(**{name: row[name] for name in names})
        fractions.setdefault(config, {})[row["name"]] = row.get("fraction_of_floor", 0.0)
    ranked = [
        {"text": describe(config), "fractions": of}
        | {"mean": statistics.geometric_mean(of.values())}
        for config, of in fractions.items()
        if min(of.values()) > 0.0
    ]
    return sorted(ranked, key=lambda entry: -entry["mean"])


def sweep(device: torch.device, ceilings: Ceilings, out: Path | None) -> None:
    """Time the candidates on every swept shape, and save after each, so that no result is lost.

    The file gets a row for each shape and config, then one for each config of a head_dim, best
    first.
    """
    head = environment(device)
    rows: list[dict[str, Any]] = []
    for shape in SWEPT:
        rows += sweep_shape(shape, device, ceilings)
        torch.cuda.empty_cache()
        save(out, head, [ceilings.row(), *rows])
    means: list[dict[str, Any]] = []
    for head_dim in sorted({shape.head_dim for shape in SWEPT}):
        names = {shape.name for shape in SWEPT if shape.head_dim == head_dim}
        ranked = rank([row for row in rows if row["name"] in names])
        means += [
            {"head_dim": head_dim, "name": entry["text"], "mean_fraction": entry["mean"]}
            for entry in ranked
        ]
        print(f"--- head_dim {head_dim}: mean fraction of the floor, then that of each shape")
        for entry in ranked[:12]:
            each = " ".join(f"{fraction:.0%}" for fraction in entry["fractions"].values())
            print(f"{entry['text']:<66}{entry['mean']:>8.1%}   {each}")
    save(out, head, [ceilings.row(), *rows, *means])


def run() -> None:
    parser = parse(__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    sweep(device, measure_ceilings(device), arguments.out)


if __name__ == "__main__":
    run()
