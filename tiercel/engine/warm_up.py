"""Warm-up: runs every kind of request once, before the first real one comes.

Kernels that Triton and NVRTC compile, modules that CUDA loads at their first launch and tables that
PyTorch makes lazily would otherwise cost the first requests up to seconds. The engine process and
the server rehearse their own layers after this one, with requests through the socket
(`ipc/startup.py`) and through the routes (`serve/lifecycle/rehearsal.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tiercel.engine.engine import Engine
from tiercel.params import SamplingParams
from tiercel.request.request import Request
from tiercel.request.score_task import ScoreRead, ScoreTask

NUM_ITEMS: Final = 20  # to score
SCORED_PROMPT: Final = 2048  # tokens: few items after so many take kernels of their own
NUM_NEW: Final = 4  # tokens: the step after the prompt, overlapping ones, the last
# One token, each tile of the kernel for few tokens, and prompts, each of which has pinned buffers
# of other sizes on its way to a GPU. Kernels of longer prompts are those of `CHUNKS`. On a CPU
# nothing depends on the length.
PROMPT_LENGTHS: Final = {
    "cuda": (1, 2, 4, 8, 16, 20, 40, 80, 160, 320, 640, 1280),
    "cpu": (1, 40),
}
# Prompt positions are read in slices that a prompt of this length fills.
LONGEST_READ: Final = 320
# Prompts with all other options, which do not depend on the prompt.
MIXED_LENGTHS: Final = (1, 40)
CHUNKS: Final = (768, 1024, 1536, 2048, 4096, 8192)  # tokens of eager steps, beyond all graphs


def _every_option(vocab_size: int) -> tuple[SamplingParams, ...]:
    """Parameters that together run each stage of the sampler."""
    few = list(range(min(8, vocab_size)))
    return (
        SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True),
        SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, logprobs=5),
        SamplingParams(
            max_tokens=NUM_NEW,
            stop_token_ids=few[:1],
            min_tokens=NUM_NEW,
            top_p=0.9,
            top_k=7,
            min_p=0.01,
            presence_penalty=0.5,
            repetition_penalty=1.1,
            logit_bias={few[-1]: 1.0},
        ),
        SamplingParams(temperature=0, max_tokens=NUM_NEW, allowed_token_ids=few, prompt_logprobs=1),
    )


def _options_at(length: int, vocab_size: int) -> list[SamplingParams]:
    """The parameters to run after a prompt of some tokens."""
    plain, *mixed, read = _every_option(vocab_size)
    asked = [plain, *(mixed if length in MIXED_LENGTHS else ())]
    return [*asked, read] if length <= LONGEST_READ else asked


def _run(engine: Engine, request: Request) -> None:
    """Run a request to its end; where ranks have requests of their own, one on each of them."""
    engine.submit(request)
    for _ in range(1, engine.config.num_schedulers):
        engine.submit(request.clone_for_engine())
    while engine.has_work:
        engine.step()


def _score_items(engine: Engine, length: int, vocab_size: int) -> None:
    """Score items after a prompt that was computed before, so that they have a step of their own.

    length: of the prompt, tokens.
    """
    few = tuple(range(min(2, vocab_size)))
    items = ((0,),) * NUM_ITEMS if length > NUM_ITEMS else ((0,),)
    task = ScoreTask(items, ((ScoreRead(0, few),),))
    prompt, params = [i % vocab_size for i in range(length)], SamplingParams()
    _run(engine, Request("warm-up", prompt, params, 0, 0, frozenset(), 1))
    _run(engine, Request("warm-up", prompt, params, 0, 0, frozenset(), 0, score=task))


def warm_up(engine: Engine, vocab_size: int) -> None:
    """Run requests of every kind and forget them: no block of theirs is kept, nothing is counted.

    Args:
        engine: with nothing to do.
        vocab_size: token ids are below it.
    """
    config = engine.config
    engine.config = replace(config, sync_debug=False)  # a kernel that is loaded waits
    try:
        _run_every_kind(engine, vocab_size)
    finally:
        engine.config = config


def _run_every_kind(engine: Engine, vocab_size: int) -> None:
    config = engine.config
    most = min(config.max_model_len - NUM_NEW, engine.scheduler.capacity - NUM_NEW)
    if config.device.type == "cuda":
        # cuBLAS loads a kernel when it first chooses it, by the number of rows. These run first,
        # because nothing here waits for them: if they came last, the first request would.
        for num_tokens in CHUNKS:
            is_eager = num_tokens > engine.runner.prompt_steps.largest
            if is_eager and num_tokens <= min(most, config.max_num_batched_tokens):
                engine.run_scratch([num_tokens])
    for length in PROMPT_LENGTHS[config.device.type]:
        if length > most:
            break
        # Each length in steps of its own: beside a long prompt a short one runs on its kernels.
        for params in _options_at(length, vocab_size):
            prompt = [i % vocab_size for i in range(length)]
            _run(engine, Request("warm-up", prompt, params, 0, 0, frozenset({0}), NUM_NEW))
            engine.forget()  # the next one computes its whole prompt too
    if config.device.type == "cuda" and config.packs_items:
        longest = min(most, config.max_num_batched_tokens)
        _score_items(engine, min(longest, SCORED_PROMPT), vocab_size)
    engine.forget()
