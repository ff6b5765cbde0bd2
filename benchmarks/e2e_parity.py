"""Distance of the whole model from exact log-probabilities, per dtype.

    python -m benchmarks.e2e_parity --device cuda --out benchmarks/results/e2e_parity_h200.json

Figures and bounds are those of tests/parity.py: the default model compared with a recorded float32
forward of its dequantised weights, and three tiny files with a float64 forward. Decode speed is one
request of 128 tokens, for orientation: it has no floor, since the kernels have benchmarks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import environment
from benchmarks.figures import save
from tests import parity
from tiercel.llm import LLM
from tiercel.params import SamplingParams

DATA = Path("tests/data/gguf")
DEFAULT = "smollm2-135m-instruct-q4_1"
PROFILES = {"float32": parity.FP32, "float16": parity.BITS16, "bfloat16": parity.BITS16}
NEW_TOKENS = 128


def measure_default(model: str | None, device: str, dtype: str) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(model, device=device, dtype=dtype) as llm:
        figures = parity.measure(llm, parity.CASES[DEFAULT])
        parity.check(figures, PROFILES[dtype])
        llm.generate("Once upon a time", params)
        metrics = llm.generate("Once upon a time", params)[0].metrics
        seconds = metrics.finished_s - (metrics.first_token_s or 0.0)
        mixed = measure_mixed_batch(llm)
    speed = {"decode_tokens_per_second": (NEW_TOKENS - 1) / seconds}
    bounds = vars(PROFILES[dtype])
    return (
        {"model": DEFAULT, "dtype": dtype, "error": figures, "error_bound": bounds} | speed | mixed
    )


def measure_mixed_batch(llm: LLM) -> dict[str, Any]:
    """Greedy ids of prompts of 1 to 2,000 tokens, together compared with one by one."""
    words = parity.CASES[DEFAULT]["eval_text"]["ids"]
    prompts = [
        {"prompt_token_ids": [words[(7 * n + i) % len(words)] for i in range(n)]}
        for n in (1, 2, 63, 64, 65, 500, 1000, 2000)
    ]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    together = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
    equal = sum(a == b for a, b in zip(together, alone, strict=True))
    return {"mixed_prompts": len(prompts), "mixed_prompts_with_equal_greedy_ids": equal}


def measure_tiny(device: str, dtype: str) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(DATA.glob("*.gguf")):
        case = np.load(path.with_suffix(".npz"))
        with LLM(path, device=device, dtype=dtype) as llm:
            logits = llm.logits(case["tokens"].tolist()).astype(np.float64)
        error = ((logits - case["logits"]) ** 2).sum() / (
            case["logits"].astype(np.float64) ** 2
        ).sum()
        rows.append({"model": path.stem, "dtype": dtype, "nmse": float(error)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default=None, help="the default model's file; None fetches it")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    dtypes = [d for d in PROFILES if d != "float16" or arguments.device != "cpu"]
    rows = [measure_default(arguments.model, arguments.device, dtype) for dtype in dtypes]
    rows += [row for dtype in dtypes for row in measure_tiny(arguments.device, dtype)]
    print(*rows, sep="\n")
    save(arguments.out, environment(torch.device(arguments.device)), rows)


if __name__ == "__main__":
    main()
