"""The small DeepSeek-V4 end to end: what drafts gain on real text, and what formats lose.

    python -m benchmarks.e2e_small_v4 tests/data/small_v4 --out e2e_small_v4.json

Text is that of files which the model never saw (benchmarks/small_v4/corpus.py).

Drafts: one request at a time, greedy unless --temperature says otherwise: greedy answers of so
small a model end in loops, which are easy to draft, so 1 is the fairer figure. The prompt is the
start of a file. For each drafter and limit of draft tokens, in an engine of its own: tokens of a
step, the share of first, second, ... drafts that are right, and the rate of steady decoding against
that of an engine without drafts. Answers are compared with those of that engine; where greedy ones
part, the largest difference of the two tokens' logits is told.

Formats: perplexity as released, with experts that `tiercel convert` writes in NVFP4, and by other
options; with --unrounded also that of the weights before they were rounded to FP8 and FP4.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.common import environment
from benchmarks.e2e_spec import decode
from benchmarks.figures import save
from benchmarks.small_v4.corpus import BOS, EOS, Document, encode, read_corpus
from tiercel import LLM, SamplingParams
from tiercel.errors import TiercelError
from tiercel.models.convert import find_rounded, write_model
from tiercel.models.convert_plan import plan_conversion

DRAFTERS = ("ngram", "mtp", "hybrid")
GPU_SHARE = 0.2  # of the memory: the model is small, and may be in training beside this
NUM_SAMPLES = 3  # answers that are kept as text
SHOWN_CHARACTERS = 200  # of a prompt's end


@dataclass(frozen=True)
class Sizes:
    """Tokens of a prompt, of an answer and of a text for perplexity, how many of each, and how."""

    prompts: int = 16
    prompt_tokens: int = 384
    answer_tokens: int = 192
    windows: int = 48
    window_tokens: int = 1024
    limits: Sequence[int] = (1, 2, 3, 5)
    temperature: float = 0.0


@dataclass(frozen=True)
class Text:
    """Prompts, and sequences for perplexity: token ids."""

    prompts: Sequence[Sequence[int]]
    windows: Sequence[Sequence[int]]


def read_text(tokenizer: Tokenizer, documents: Sequence[Document], sizes: Sizes) -> Text:
    """Cut documents: starts of long ones, and pieces spread over all of them.

    Raises:
        SystemExit: no document is long enough.
    """
    ids = encode(tokenizer, documents).tolist()
    starts = [i for i, token in enumerate(ids) if token == BOS]
    needed = sizes.prompt_tokens + sizes.answer_tokens
    prompts = [
        ids[start : start + sizes.prompt_tokens]
        for start in starts
        if len(ids) >= start + needed and EOS not in ids[start : start + needed]
    ]
    last = len(ids) - sizes.window_tokens
    if not prompts or last < 0:
        raise SystemExit(f"the {len(documents)} files held out have {len(ids)} tokens: too few.")
    spread = np.linspace(0, last, sizes.windows).astype(int).tolist()
    windows = [ids[start : start + sizes.window_tokens] for start in spread]
    return Text(prompts[: sizes.prompts], windows)


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[LLM]:
    """A model whose memory is free again afterwards."""
    with LLM(folder, **options) as llm:
        yield llm
    del llm
    gc.collect()
    torch.cuda.empty_cache()


def answers(llm: LLM, text: Text, sizes: Sizes) -> tuple[list[list[int]], list[float]]:
    """Tokens and rates of the answers to all prompts, one after the other."""
    params = SamplingParams(
        temperature=sizes.temperature, max_tokens=sizes.answer_tokens, ignore_eos=True, seed=0
    )
    found, rates = [], []
    for prompt in text.prompts:
        request = llm._inputs.request(list(prompt), params, 0)
        rates.append(decode(llm, [request])[0])
        found.append(list(request.output_token_ids))
    return found, rates


def parting_gap(llm: LLM, prompt: Sequence[int], answer: list[int], other: list[int]) -> float:
    """Difference of the logits of two answers' first different tokens; 0 for equal answers."""
    pairs = enumerate(zip(answer, other, strict=True))
    place = next((i for i, (a, b) in pairs if a != b), None)
    if place is None:
        return 0.0
    logits = llm.logits([*prompt, *answer[:place]])[-1]
    return abs(float(logits[answer[place]] - logits[other[place]]))


def measure_plain(
    llm: LLM, text: Text, sizes: Sizes
) -> tuple[list[list[int]], float, list[dict[str, Any]]]:
    """Answers without drafts, their rate, and rows of the figures: the rate and some answers."""
    answers(llm, Text(text.prompts[:1], ()), sizes)  # the first use of what is built lazily
    found, rates = answers(llm, text, sizes)
    rate = statistics.harmonic_mean(rates)
    rows: list[dict[str, Any]] = [{"name": "plain", "tokens_per_second": round(rate, 1)}]
    rows += [
        {
            "name": "sample",
            "prompt_end": llm.decode(prompt)[-SHOWN_CHARACTERS:],
            "answer": llm.decode(answer),
        }
        for prompt, answer in zip(text.prompts[:NUM_SAMPLES], found, strict=False)
    ]
    return found, rate, rows


def measure_drafts(
    llm: LLM, text: Text, sizes: Sizes, plain: tuple[list[list[int]], float]
) -> dict[str, Any]:
    """Acceptance and rate with drafts; `plain`: answers and rate without."""
    answers(llm, Text(text.prompts[:1], ()), sizes)
    before = llm.draft_counts
    found, rates = answers(llm, text, sizes)
    pairs = zip(text.prompts, plain[0], found, strict=True)
    is_greedy = sizes.temperature == 0  # else noise is part of the choice
    gap = max(parting_gap(llm, *pair) for pair in pairs) if is_greedy else None
    counts = llm.draft_counts
    steps = counts.num_steps - before.num_steps
    verified = max(1, counts.num_drafts - before.num_drafts)
    accepted = counts.num_accepted_tokens - before.num_accepted_tokens
    places = before.accepted_per_pos + [0] * len(counts.accepted_per_pos)
    shares = zip(counts.accepted_per_pos, places, strict=False)
    rate = statistics.harmonic_mean(rates)
    return {
        "name": "drafts",
        "spec": llm.config.spec.method,
        "limit": llm.config.spec.max_drafts,
        "temperature_ratio": sizes.temperature,
        "tokens_per_step": round(1 + accepted / max(1, steps), 3),
        "tokens_per_second": round(rate, 1),
        "ratio": round(rate / plain[1], 3),
        "right_share": {str(i): round((a - b) / verified, 3) for i, (a, b) in enumerate(shares, 1)},
        "drafted_steps": verified,
        "steps": steps,
        "equal_answers": sum(a == b for a, b in zip(found, plain[0], strict=True)),
        "answers": len(found),
        "largest_parting_gap_nats_per_token": gap if gap is None else round(gap, 4),
    }


def perplexity(llm: LLM, windows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Mean loss of the tokens after the first of each window."""
    total, count = 0.0, 0
    for ids in windows:
        rows = torch.from_numpy(llm.logits(ids))[:-1].double()
        logs = rows.log_softmax(1).gather(1, torch.tensor(ids[1:]).unsqueeze(1))
        total, count = total - float(logs.sum()), count + len(ids) - 1
    loss = total / count
    return {
        "tokens": count,
        "loss_nats_per_token": round(loss, 5),
        "perplexity_per_token": round(math.exp(loss), 4),
    }


def convert(folder: Path, out: Path) -> dict[str, Any]:
    """Write a folder with experts in NVFP4; says how many matrices are not exactly the same."""
    plan = plan_conversion(folder, out, can_replace=False)
    rounded = find_rounded(plan, _silent)
    write_model(plan, _silent)
    return {"matrices": len(plan.matrices), "rounded_matrices": len(rounded)}


def _silent(what: str, done: int, total: int) -> None:
    """No report."""


def variants(
    options: argparse.Namespace, converted: Path
) -> dict[str, tuple[Path, dict[str, str]]]:
    """Folder and options of each row of perplexity; the first is what users get."""
    found: dict[str, tuple[Path, dict[str, str]]] = {
        "released": (options.folder, {}),
        "released, float32": (options.folder, {"dtype": "float32", "kv_dtype": "float32"}),
        "released, cache in bf16": (options.folder, {"dtype": "bfloat16", "kv_dtype": "bf16"}),
        "released, native rounding": (options.folder, {"numerics": "native"}),
        "nvfp4 experts": (converted, {}),
    }
    if options.unrounded is not None:
        found["unrounded, bf16"] = (options.unrounded, {})
    return found


def measure_all(
    options: argparse.Namespace, sizes: Sizes, head: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """All rows; they are written after each case, so that a later one may fail."""
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    text = read_text(tokenizer, read_corpus().held_out, sizes)
    rows: list[dict[str, Any]] = []

    def add(*found: dict[str, Any]) -> None:
        rows.extend(found)
        print(*found, sep="\n", flush=True)
        save(options.out, head, rows)

    engine = {"device": options.device, "max_num_seqs": 1, "gpu_memory_utilization": GPU_SHARE}
    with tempfile.TemporaryDirectory() as scratch:
        converted = Path(scratch) / "nvfp4"
        conversion = convert(options.folder, converted)
        for name, (folder, given) in variants(options, converted).items():
            row = {"name": "perplexity", "weights": name}
            try:
                with opened(folder, **engine, **given) as llm:
                    row |= perplexity(llm, text.windows)
            except TiercelError as error:  # options that a device does not have
                row["refused"] = str(error)
            add(row | (conversion if folder == converted else {}))
    with opened(options.folder, **engine) as llm:
        found, rate, plain_rows = measure_plain(llm, text, sizes)
    add(*plain_rows)
    for spec, limit in itertools.product(options.spec, sizes.limits):
        with opened(options.folder, **engine, spec=spec, num_spec_tokens=limit) as llm:
            row = measure_drafts(llm, text, sizes, (found, rate))
        add(row)
    return rows


def main() -> None:
    """Measure one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--unrounded", type=Path, help="folder of the weights before rounding")
    parser.add_argument("--spec", nargs="*", default=DRAFTERS)
    parser.add_argument("--limits", type=int, nargs="+", default=Sizes.limits, help="draft tokens")
    parser.add_argument("--prompts", type=int, default=Sizes.prompts)
    parser.add_argument("--answer-tokens", type=int, default=Sizes.answer_tokens)
    parser.add_argument("--temperature", type=float, default=Sizes.temperature)
    parser.add_argument("--windows", type=int, default=Sizes.windows, help="for perplexity")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = Sizes(
        prompts=options.prompts,
        answer_tokens=options.answer_tokens,
        windows=options.windows,
        limits=tuple(options.limits),
        temperature=options.temperature,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = environment(device if options.device == "auto" else torch.device(options.device))
    measure_all(options, sizes, head)


if __name__ == "__main__":
    main()
