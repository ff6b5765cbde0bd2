"""Load a model as the options say: find the file, check it, and only then import PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tiercel import env
from tiercel.cli.options import CommonOptions, EngineOptions, SamplingOptions
from tiercel.cli.terminal import ProgressReporter, UsageError, say
from tiercel.cold_start import paused_collector, postpone_meta_kernels, preload_pytorch
from tiercel.errors import ArgumentError, InternalError, InvalidRequestError
from tiercel.machine import check_platform

if TYPE_CHECKING:
    from tiercel.llm import LLM
    from tiercel.params import SamplingDefaults, SamplingParams, StructuredOutputs
    from tiercel.request.output import CompletionOutput, StreamDelta

DEFAULT_TEMPERATURE: Final = 0.7  # where neither an option nor the model's file has one
DEFAULT_TOP_P: Final = 0.95


@contextlib.contextmanager
def loaded(
    model: str | None, engine: EngineOptions, sampling: SamplingOptions, common: CommonOptions
) -> Iterator[LLM]:
    """Load the model for the duration of the block.

    Raises:
        TiercelError: the model is not found, damaged, not supported, does not fit, or takes no
            text.
    """
    from tiercel.loader.hub import resolve
    from tiercel.models.source import open_source
    from tiercel.text.tokenizer import no_text_reason

    warning = check_platform()
    if warning is not None and not common.quiet:
        say("warning", warning)
    with ProgressReporter(is_quiet=common.quiet) as report, paused_collector():
        path = resolve(model, offline=engine.offline, report=report)
        postpone_meta_kernels()
        preload_pytorch()  # after the imports above: while it runs no other library can be loaded
        source = open_source(path)  # a damaged file ends here, before PyTorch is imported
        if not source.has_text:
            raise InvalidRequestError(no_text_reason(path.name))
        source.tokenizer(env.cache_dir() / "tokenizers")  # while PyTorch's library is loaded
        report("Loading PyTorch")
        env.shorten_openmp_spins()
        from tiercel.llm import LLM

        llm = LLM(
            source,
            device=engine.device,
            dtype=engine.dtype,
            kv_dtype=engine.kv_dtype,
            numerics=engine.numerics,
            max_model_len=engine.max_model_len,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            spec=engine.spec,
            num_spec_tokens=engine.num_spec_tokens,
            threads=engine.threads,
            tensor_parallel_size=engine.tensor_parallel_size,
            expert_parallel=engine.expert_parallel,
            data_parallel_attention=engine.data_parallel_attention,
            seed=sampling.seed,
            progress=report,
        )
    try:
        yield llm
    finally:
        llm.close()


def check_answer(answer: CompletionOutput | StreamDelta) -> None:
    """Refuse an answer that the engine aborted.

    Raises:
        InternalError: the answer ended with an error.
        InvalidRequestError: the requested form could not be followed further.
    """
    if answer.finish_reason == "error":
        if answer.stop_reason == "schema_too_complex":
            raise InvalidRequestError(
                "the form of the answer is too complex to follow further.", hint="Simplify it."
            )
        raise InternalError(
            f"the answer ended with the error {answer.stop_reason}.",
            hint="Check the model with tiercel inspect --verify.",
        )


def make_params(
    sampling: SamplingOptions,
    *,
    max_tokens: int | None,
    n: int = 1,
    stop: tuple[str, ...] = (),
    logprobs: int | None = None,
    form: StructuredOutputs | None = None,
) -> SamplingParams:
    """The sampling parameters of the options, validated before a model is loaded.

    Raises:
        UsageError: a value is out of range.
    """
    from tiercel.params import SamplingDefaults, SamplingParams

    try:
        params = SamplingParams(
            n=n,
            seed=sampling.seed,
            stop=stop,
            max_tokens=sampling.max_tokens if sampling.max_tokens is not None else max_tokens,
            logprobs=logprobs,
            structured_outputs=form,
        )
        defaults = SamplingDefaults(temperature=DEFAULT_TEMPERATURE, top_p=DEFAULT_TOP_P)
        return replace(params, **_given(sampling).over(defaults).given())
    except ArgumentError as error:
        raise UsageError(str(error), hint=error.hint) from error


def with_model_defaults(
    params: SamplingParams, sampling: SamplingOptions, llm: LLM
) -> SamplingParams:
    """The parameters, with the defaults of the model's file for options that were not given."""
    chosen = _given(sampling).over(llm.source.sampling_defaults)
    return replace(params, **chosen.given())


def _given(sampling: SamplingOptions) -> SamplingDefaults:
    from tiercel.params import SamplingDefaults

    return SamplingDefaults(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repeat_penalty,
    )
