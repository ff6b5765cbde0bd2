"""Runs a small model through the whole engine, graphs included, for a sanitizer to watch.

    compute-sanitizer --tool=memcheck python -m benchmarks.sanitize_engine wide

`benchmarks/sanitize.py` runs it as a separate target. Models have two layers of random weights in
Q4_K and Q6_K (the one with an MTP head: in float32), but for DeepSeek-V4, which is the small
trained one. Each is loaded as for a server, so
graphs of prompts and answers are captured and all kernels warm up, and then answers prompts of many
lengths alone and together, in chunks, after prefix hits, with every stage of the sampler, and
scores lists. Results must be finite; tests check whether they are right.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import synthetic_model
from benchmarks.synthetic_model import Shape
from tests.mtp_model import mtp_model
from tests.small_v4 import SMALL
from tiercel.llm import LLM
from tiercel.params import SamplingParams

MAX_MODEL_LEN, STEP_TOKENS, NUM_ROWS = 400, 128, 4
LENGTHS = (1, 7, 17, 63, 130, 300)  # of prompts; the last comes in chunks
NUM_NEW = 12


@dataclass(frozen=True)
class Case:
    """A model and its drafter; without shape and folder, the tests' model with an MTP head."""

    shape: Shape | None
    spec: str
    has_step_kernel: bool = True
    folder: Path | None = None


CASES = {
    # The width of Qwen3-8B; heads of 128.
    "wide": Case(Shape(4096, 2, 32, 8, 128, 8192, vocab=512), "off"),
    "drafts": Case(Shape(512, 2, 8, 2, 128, 1024, vocab=512), "ngram"),
    "narrow": Case(Shape(512, 2, 8, 2, 64, 1280, vocab=512, arch="llama"), "ngram"),
    "head": Case(None, "hybrid", has_step_kernel=False),
    "deepseek_v4": Case(None, "hybrid", has_step_kernel=False, folder=SMALL),
}


def write_model(name: str, path: Path) -> None:
    """Write the file of a case."""
    shape = CASES[name].shape
    if shape is None:
        mtp_model(path, metadata={"qwen3.context_length": MAX_MODEL_LEN})
    else:
        synthetic_model.SHAPES[name] = shape
        synthetic_model.write(name, path)


def every_params() -> list[SamplingParams]:
    """Parameters that together use each stage of the sampler."""
    fields = {"max_tokens": NUM_NEW, "ignore_eos": True}
    return [
        SamplingParams(temperature=0, logprobs=5, **fields),
        SamplingParams(temperature=0.8, top_p=0.9, seed=1, **fields),
        SamplingParams(top_k=5, min_p=0.1, seed=2, presence_penalty=0.5, **fields),
        SamplingParams(repetition_penalty=1.2, logit_bias={5: 3.0}, seed=3, **fields),
        SamplingParams(temperature=0, allowed_token_ids=[5, 6], **fields),  # it repeats itself
        SamplingParams(temperature=0, prompt_logprobs=1, **fields),
    ]


def generate(llm: LLM) -> None:
    """Generate for prompts of all lengths alone, then for all together with mixed parameters."""
    params = every_params()
    prompts = [{"prompt_token_ids": [(7 * i + n) % 13 + 5 for i in range(n)]} for n in LENGTHS]
    outputs = [llm.generate(prompt, params[0])[0] for prompt in prompts]
    mixed = [params[i % len(params)] for i in range(len(prompts))]
    outputs += llm.generate(prompts, mixed)
    outputs += llm.generate(prompts[:NUM_ROWS], params[4])  # several rows that draft
    # After a prefix that is cached by now.
    longer = {"prompt_token_ids": [*prompts[-1]["prompt_token_ids"], 1, 2, 3]}
    outputs += llm.generate(longer, params[0])
    assert outputs[-1].metrics.num_cached_tokens > 0
    for output in outputs:
        (answer,) = output.outputs
        assert len(answer.token_ids) == NUM_NEW
        assert all(math.isfinite(place.logprob) for place in answer.logprobs or ())


def score(llm: LLM) -> None:
    """Score lists of few and of many items, after a prompt of two blocks."""
    query = [(7 * i) % 250 for i in range(150)]
    for count in (1, 40):
        items = [[(3 * i + 5 * j) % 250 for j in range(1 + 5 * i % 17)] for i in range(count)]
        result = llm.score(query, items, label_token_ids=[5, 9, 200])
        assert np.isfinite(result.logprobs).all()


def main() -> None:
    """Run one case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("case", choices=CASES)
    name = parser.parse_args().case
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = case.folder or Path(folder, "m.gguf")
        if case.folder is None:
            write_model(name, path)
        with LLM(
            path,
            device="cuda",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=NUM_ROWS,
            max_num_batched_tokens=STEP_TOKENS,
            gpu_memory_utilization=0.5,  # other programs use the GPU too; the cache is small
            spec=case.spec,
        ) as llm:
            runner = llm._engine.runner
            assert runner.decode_steps._graphs
            assert runner.prompt_steps._padded
            fused = getattr(runner.model, "fused_decode_step", None)  # of dense decoders
            assert (fused is not None) == case.has_step_kernel
            generate(llm)
            score(llm)
            assert bool(llm.draft_counts.num_drafts) == (case.spec != "off")
    print(f"{name}: done")


if __name__ == "__main__":
    main()
