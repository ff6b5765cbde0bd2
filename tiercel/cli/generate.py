"""`tiercel generate`: continue a prompt; the text is streamed to standard output."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from tiercel.cli.loading import check_answer, loaded, make_params, with_model_defaults
from tiercel.cli.options import CommonOptions, EngineOptions, ModelName, SamplingOptions
from tiercel.cli.terminal import PromptLine, UsageError, check_utf8, note, write

if TYPE_CHECKING:
    from tiercel.llm import LLM
    from tiercel.params import SamplingParams, StructuredOutputs
    from tiercel.request.output import CompletionOutput, RequestOutput, StreamDelta

DEFAULT_MAX_TOKENS = 256
MAX_PROMPT_BYTES = 256 << 20

_GROUP = Group("Prompt and output", sort_key=1)


def generate(
    prompt: Annotated[
        str | None,
        Parameter(group=_GROUP, help="Text to continue; left out: standard input."),
    ] = None,
    /,
    *,
    file: Annotated[Path | None, Parameter(group=_GROUP, help="Read the prompt from it.")] = None,
    chat: Annotated[
        bool, Parameter(group=_GROUP, help="Send the prompt as a chat message.")
    ] = False,
    n: Annotated[int, Parameter(group=_GROUP, help="Number of answers.")] = 1,
    stop: Annotated[
        tuple[str, ...], Parameter(group=_GROUP, help="End at this text; repeatable.")
    ] = (),
    echo: Annotated[bool, Parameter(group=_GROUP, help="Write the prompt first.")] = False,
    logprobs: Annotated[
        int | None, Parameter(group=_GROUP, help="Show this many likely tokens at each position.")
    ] = None,
    json: Annotated[
        bool, Parameter(group=_GROUP, help="Write one JSON object at the end.")
    ] = False,
    schema: Annotated[
        Path | None, Parameter(group=_GROUP, help="JSON schema that the answer satisfies.")
    ] = None,
    grammar: Annotated[
        Path | None, Parameter(group=_GROUP, help="Lark grammar that the answer matches.")
    ] = None,
    no_special_in_prompt: Annotated[
        bool, Parameter(group=_GROUP, help="Treat <|...|> in the prompt as plain text.")
    ] = False,
    model: ModelName = None,
    engine: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008 - frozen
    common: CommonOptions = CommonOptions(),  # noqa: B008 - frozen
) -> int:
    """Continue a text, by at most 256 tokens unless --max-tokens says otherwise."""
    text = read_prompt(prompt, file)
    params = make_params(
        sampling,
        max_tokens=DEFAULT_MAX_TOKENS,
        n=n,
        stop=stop,
        logprobs=logprobs,
        form=read_form(schema, grammar),
    )
    # After an echo on the terminal the progress line would overwrite the last line of the prompt.
    is_quiet = common.quiet or (echo and sys.stdout.isatty())
    with loaded(model, engine, sampling, common) as llm, PromptLine(is_quiet=is_quiet) as line:
        params = with_model_defaults(params, sampling, llm)
        started_s = time.perf_counter()
        if n == 1 and not json and logprobs is None:
            deltas = _deltas(llm, text, params, chat, not no_special_in_prompt, line)
            num_tokens = _stream(deltas, params, text, echo, line)
        else:
            output = _complete(llm, text, params, chat, not no_special_in_prompt, line)
            num_tokens = sum(len(answer.token_ids) for answer in output.outputs)
            if json:
                write(json_module.dumps(_as_json(llm, output, text, echo)) + "\n")
            else:
                _write_answers(llm, output, text if echo else "")
        if common.verbose:
            seconds = time.perf_counter() - started_s
            note(f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s)")
    return 0


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, the file or standard input; one final newline is dropped.

    Raises:
        UsageError: none or two were given, or the prompt is empty or not UTF-8 text.
    """
    if prompt is not None and file is not None:
        raise UsageError("prompt: given twice, as an argument and by --file.", hint="Give one.")
    if prompt is not None:
        check_utf8("prompt", prompt, UsageError)
        where, text = "prompt", prompt
    elif file is not None:
        where, text = str(file), _read_text(file, MAX_PROMPT_BYTES, "the prompt").removesuffix("\n")
    else:
        where, text = "standard input", _read_input().removesuffix("\n")
    if not text:
        raise UsageError(f"{where}: the prompt is empty.", hint="Give at least one character.")
    return text


def _read_input() -> str:
    if sys.stdin.isatty():
        raise UsageError(
            "prompt: none was given.", hint="Write it as an argument, pipe it in, or use --file."
        )
    data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    return _text(data, MAX_PROMPT_BYTES, "standard input", "the prompt")


def read_form(schema: Path | None, grammar: Path | None) -> StructuredOutputs | None:
    """The form of the answer that `--schema` or `--grammar` sets.

    Raises:
        UsageError: both were given, or a file contains no UTF-8 text or no valid form.
    """
    from tiercel.errors import ArgumentError
    from tiercel.params import LIMITS, StructuredOutputs

    if schema is not None and grammar is not None:
        raise UsageError("--schema and --grammar exclude each other.", hint="Give one.")
    try:
        if schema is not None:
            text = _read_text(schema, LIMITS.max_schema_bytes, "the schema")
            return StructuredOutputs(json=text)
        if grammar is not None:
            text = _read_text(grammar, LIMITS.max_grammar_bytes, "the grammar")
            return StructuredOutputs(grammar=text)
    except ArgumentError as error:
        raise UsageError(f"{schema or grammar}: {error}", hint=error.hint) from error
    return None


def _read_text(path: Path, limit: int, what: str) -> str:
    with path.open("rb") as stream:
        return _text(stream.read(limit + 1), limit, str(path), what)


def _text(data: bytes, limit: int, name: str, what: str) -> str:
    if len(data) > limit:
        raise UsageError(f"{name}: {what} is over {limit} bytes.", hint="Cut it.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name}: byte {error.start} is not valid UTF-8.", hint=f"Give {what} in UTF-8."
        ) from error


def _deltas(
    llm: LLM,
    text: str,
    params: SamplingParams,
    is_chat: bool,
    parse_special: bool,
    line: PromptLine,
) -> Iterator[StreamDelta]:
    if is_chat:
        return llm.stream_chat([{"role": "user", "content": text}], params, progress=line)
    return llm.stream(text, params, parse_special=parse_special, progress=line)


def _note_cut(params: SamplingParams, answer: StreamDelta | CompletionOutput) -> None:
    if params.structured_outputs is not None and answer.finish_reason == "length":
        note("The answer was cut at --max-tokens, so its form is not complete.")


def _stream(
    deltas: Iterator[StreamDelta],
    params: SamplingParams,
    text: str,
    is_echo: bool,
    line: PromptLine,
) -> int:
    """Write the pieces as they arrive; returns the number of tokens."""
    num_tokens = 0
    last = text if is_echo else ""
    if is_echo:
        write(text)
    for delta in deltas:
        line.erase()
        check_answer(delta)
        _note_cut(params, delta)
        num_tokens += len(delta.token_ids)
        if delta.text:
            write(delta.text)
            last = delta.text
    if sys.stdout.isatty() and not last.endswith("\n"):
        write("\n")  # the shell's next line; a pipe or file gets exactly the text
    return num_tokens


def _complete(
    llm: LLM,
    text: str,
    params: SamplingParams,
    is_chat: bool,
    parse_special: bool,
    line: PromptLine,
) -> RequestOutput:
    if is_chat:
        output = llm.chat([{"role": "user", "content": text}], params, progress=line)
    else:
        output = llm.generate([text], params, parse_special=parse_special, progress=line)[0]
    line.erase()
    for answer in output.outputs:
        check_answer(answer)
        _note_cut(params, answer)
    return output


def _write_answers(llm: LLM, output: RequestOutput, prefix: str) -> None:
    for answer in output.outputs:
        if len(output.outputs) > 1:
            write(f"--- answer {answer.index + 1}\n")
        write(f"{prefix}{answer.text}".removesuffix("\n") + "\n")
        for row in _logprob_rows(llm, answer):
            others = "  ".join(f"{o['token']!r} {o['logprob']:.3f}" for o in row["top"])
            write(f"  {row['token']!r:<20} {row['logprob']:8.3f}   {others}\n")


def _logprob_rows(llm: LLM, answer: CompletionOutput) -> list[dict[str, Any]]:
    """For each token its text, id and log-probability, and the most likely tokens."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = llm.decode([token_id], skip_special_tokens=False)
        return {"id": token_id, "token": text, "logprob": logprob}

    return [
        {**entry(place.token_id, place.logprob), "top": [entry(*pair) for pair in place.top]}
        for place in answer.logprobs or ()
    ]


def _as_json(llm: LLM, output: RequestOutput, text: str, is_echo: bool) -> dict[str, Any]:
    answers: list[dict[str, Any]] = [
        {
            "index": answer.index,
            "text": text + answer.text if is_echo else answer.text,
            "token_ids": list(answer.token_ids),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "logprobs": None if answer.logprobs is None else _logprob_rows(llm, answer),
        }
        for answer in output.outputs
    ]
    num_prompt = len(output.prompt_token_ids)
    num_completion = sum(len(answer.token_ids) for answer in output.outputs)
    return {
        "prompt": text,
        "prompt_token_ids": list(output.prompt_token_ids),
        "answers": answers,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        },
    }
