"""Teacher-forced comparison with recorded cases of real models: profiles and figures.

A profile bounds the distance of log-probabilities from the exact float32 ones, by the precision of
activations.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CASES = json.loads((Path(__file__).parent / "data/real_models.json").read_text())["models"]


@dataclass(frozen=True)
class Profile:
    """Bounds of |difference| in log-probability; the margin from which an argmax flip is wrong."""

    greedy_median: float
    greedy_p99: float
    top5_p95: float
    text_mean: float
    flip_margin: float


FP32 = Profile(1e-3, 5e-3, 5e-3, 1e-3, 0.02)
BITS16 = Profile(0.02, 0.15, 0.25, 0.01, 0.3)
INT8 = Profile(0.02, 0.25, 0.4, 0.01, 0.3)  # activations of 8 bits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - log_sums(logits)[:, None]


def log_sums(logits: np.ndarray) -> np.ndarray:
    """The differences of logits and log-probabilities of each row."""
    most = logits.max(axis=-1)
    shifted = logits - most[:, None]
    return most + np.log(np.exp(shifted, out=shifted).sum(axis=-1, dtype=np.float64))


def measure(llm, case) -> dict[str, float]:
    """Feed each prompt with its recorded answer, and the evaluation text; return the figures."""
    greedy, top5, flips = [], [], [0.0]
    for prompt in case["prompts"]:
        ids, answer = prompt["ids"], prompt["greedy"]
        logits = llm.logits(ids + answer["ids"])
        above = log_sums(logits)
        for entry in prompt["last"]:
            row = logits[entry["pos"]] - above[entry["pos"]]
            top5 += [
                abs(row[i] - v)
                for i, v in zip(entry["top5_ids"], entry["f32_logprobs"], strict=True)
            ]
        for step, token_id in enumerate(answer["ids"]):
            row = logits[len(ids) - 1 + step] - above[len(ids) - 1 + step]
            greedy.append(abs(row[token_id] - answer["f32_logprobs"][step]))
            if row.argmax() != answer["f32_top1_ids"][step]:
                flips.append(answer["f32_margins"][step])
    text = case["eval_text"]
    logits = llm.logits(text["ids"])
    chosen = logits[np.arange(len(text["ids"]) - 1), text["ids"][1:]] - log_sums(logits)[:-1]
    return {
        "greedy_median": float(np.median(greedy)),
        "greedy_p99": float(np.percentile(greedy, 99)),
        "top5_p95": float(np.percentile(top5, 95)),
        "text_mean": abs(float(chosen.mean()) - text["f32_mean_logprob"]),
        "flip_margin": max(flips),
    }


def check(figures: dict[str, float], profile: Profile) -> None:
    """Fail with all figures if one exceeds its bound."""
    for name, value in figures.items():
        assert value <= getattr(profile, name), f"{name}={value:.4g} of {figures} exceeds {profile}"
