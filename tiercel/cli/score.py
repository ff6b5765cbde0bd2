"""`tiercel score`: how likely each label is after each of many items, as a table or JSON lines."""

from __future__ import annotations

import json as json_module
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import Group, Parameter

from tiercel.cli.loading import loaded
from tiercel.cli.options import CommonOptions, EngineOptions, ModelName, SamplingOptions
from tiercel.cli.terminal import ProgressReporter, UsageError, note, one_line, write
from tiercel.errors import TiercelError

if TYPE_CHECKING:
    from tiercel.llm import LLM
    from tiercel.request.score_inputs import ScoreOutput

MAX_FILE_BYTES: Final = 256 << 20
MAX_LINE_BYTES: Final = 32 << 20
_LEAST_DECIMAL: Final = 5e-5  # smallest value that rounds up to a nonzero fourth decimal
_FIELDS: Final = ("query", "items", "labels", "label_token_ids", "suffix", "normalize")
_GROUP = Group("Items and output", sort_key=1)


@dataclass(frozen=True, slots=True)
class _Options:
    """Options that apply to every list of a run."""

    labels: list[str] | None
    suffix: str
    normalize: str
    long_items: str
    top: int | None


def score(
    *,
    query: Annotated[
        str | None,
        Parameter(group=_GROUP, help="Text before every item, or @FILE; left out: JSON lines."),
    ] = None,
    items: Annotated[
        Path | None, Parameter(group=_GROUP, help='Items: a line each, or JSON lines of "text".')
    ] = None,
    file: Annotated[
        Path | None, Parameter(group=_GROUP, help="JSON lines to score [standard input].")
    ] = None,
    labels: Annotated[
        str | None, Parameter(group=_GROUP, help="Possible texts after an item: Yes,No.")
    ] = None,
    suffix: Annotated[str, Parameter(group=_GROUP, help="Text between item and label.")] = "",
    normalize: Annotated[
        Literal["vocab", "labels"],
        Parameter(group=_GROUP, help="Normalise over all tokens (vocab) or labels."),
    ] = "vocab",
    long_items: Annotated[
        Literal["refuse", "skip", "cut"],
        Parameter(group=_GROUP, help="Items over the context: refuse, skip or cut."),
    ] = "skip",
    top: Annotated[int | None, Parameter(group=_GROUP, help="Show only the best N items.")] = None,
    json: Annotated[bool, Parameter(group=_GROUP, help="Write one JSON object.")] = False,
    model: ModelName = None,
    engine: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
    common: CommonOptions = CommonOptions(),  # noqa: B008 - frozen
) -> int:
    """Score items after a query by the probability of labels, best first."""
    listed = None if labels is None else labels.split(",")
    options = _Options(listed, suffix, normalize, long_items, top)
    _check_use(query, items, file, options)
    if query is None or items is None:
        lines = _open_lines(file)
        with loaded(model, engine, SamplingOptions(), common) as llm:
            return _score_lines(llm, lines, options, common)
    text = _read(Path(query[1:])).removesuffix("\n") if query.startswith("@") else query
    texts = list(_read_items(items))
    with loaded(model, engine, SamplingOptions(), common) as llm:
        started_s = time.perf_counter()
        with ProgressReporter(is_quiet=common.quiet) as report:
            output = _score(llm, {"query": text, "items": texts}, options, report)
        _note_speed(len(texts), time.perf_counter() - started_s, common)
    for number, error in output.errors.items():
        note(f"item {number + 1}: {error}")
    order = _best_first(output, top)
    if json:
        write(json_module.dumps(_as_json(text, texts, listed or [], output, order)) + "\n")
    else:
        _write_table(texts, listed or [], output, order)
    return 0


def _check_use(query: str | None, items: Path | None, file: Path | None, options: _Options) -> None:
    if (query is None) != (items is None):
        missing, given = ("--items", "--query") if items is None else ("--query", "--items")
        raise UsageError(f"{missing}: is missing, but {given} is given.", hint="Give both.")
    if query is not None and file is not None:
        raise UsageError("--file: excludes --query.", hint="Give queries inside the file.")
    if query is not None and options.labels is None:
        raise UsageError("--labels: is missing.", hint="Name texts, for example Yes,No.")
    if options.top is not None and options.top < 1:
        raise UsageError(f"--top {options.top}: is out of range.", hint="Use 1 or more.")


def _read(path: Path) -> str:
    with path.open("rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{path}: is over {MAX_FILE_BYTES} bytes.", hint="Cut it.")
    try:
        return data.decode("utf-8-sig")  # without the byte order mark that some editors write
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: byte {error.start} is not valid UTF-8.", hint="Give it in UTF-8."
        ) from error


def _read_items(path: Path) -> Iterator[str]:
    """The items of a file; blank lines are skipped.

    Raises:
        UsageError: there are none, or a line of JSON lines has another form.
    """
    lines = [line for line in _read(path).split("\n") if line.strip()]
    if not lines:
        raise UsageError(f"{path}: has no items.", hint="Write one on each line.")
    is_json = lines[0].lstrip().startswith("{")
    for number, line in enumerate(lines, 1):
        if not is_json:
            yield line.removesuffix("\r")
            continue
        try:
            text = json_module.loads(line)["text"]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise UsageError(
                f'{path}: line {number} is not a JSON object with "text".', hint="Fix or remove it."
            ) from error
        if not isinstance(text, str):
            raise UsageError(f'{path}: "text" of line {number} is not text.', hint="Fix it.")
        yield text


def _score(
    llm: LLM, asked: Mapping[str, Any], options: _Options, report: ProgressReporter
) -> ScoreOutput:
    ids = asked.get("label_token_ids")
    return llm.score(
        asked["query"],
        asked["items"],
        asked.get("labels", options.labels if ids is None else None),
        label_token_ids=ids,
        suffix=asked.get("suffix", options.suffix),
        normalize=asked.get("normalize", options.normalize),
        long_items=options.long_items,
        progress=lambda done, total: report("Scoring", done, total),
    )


def _note_speed(count: int, seconds: float, common: CommonOptions) -> None:
    if not common.quiet:
        note(f"{count} items in {seconds:.2f} s ({count / seconds:.1f} items/s)")


def _best_first(output: ScoreOutput, top: int | None) -> list[int]:
    """Numbers of items by the probability of the first label; items with NaN are last."""
    first = [-1.0 if math.isnan(p) else p for p in output.probs[:, 0].tolist()]
    return sorted(range(len(first)), key=lambda i: -first[i])[:top]


def _write_table(
    texts: list[str], labels: list[str], output: ScoreOutput, order: list[int]
) -> None:
    widths = [max(8, len(one_line(label)) + 1) for label in labels]
    heads = [one_line(label).rjust(width) for label, width in zip(labels, widths, strict=True)]
    write(f"{'item':>6}{''.join(heads)}  text\n")
    for number in order:
        row = output.probs[number].tolist()
        cells = [_share(p).rjust(width) for p, width in zip(row, widths, strict=True)]
        write(f"{number + 1:>6}{''.join(cells)}  {one_line(texts[number])}\n")


def _share(p: float) -> str:
    """Four decimals, or two significant digits where those would show 0."""
    return f"{p:.1e}" if 0 < p < _LEAST_DECIMAL else f"{p:.4f}"


def _numbers(row: list[float]) -> list[float | None]:
    """The row as JSON values: None instead of NaN, which JSON does not have."""
    return [None if math.isnan(value) else value for value in row]


def _usage(output: ScoreOutput) -> dict[str, Any]:
    usage = output.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "mode": usage.mode,
    }


def _as_json(
    query: str, texts: list[str], labels: list[str], output: ScoreOutput, order: list[int]
) -> dict[str, Any]:
    results = [
        {
            "index": number,
            "text": texts[number],
            "probs": _numbers(output.probs[number].tolist()),
            "logprobs": _numbers(output.logprobs[number].tolist()),
            "error": output.errors.get(number),
        }
        for number in order
    ]
    return {"query": query, "labels": labels, "results": results, "usage": _usage(output)}


def _open_lines(file: Path | None) -> IO[bytes]:
    if file is not None:
        return file.open("rb")
    if sys.stdin.isatty():
        raise UsageError(
            "--query: is missing, and no JSON lines come in.",
            hint="Give --query and --items, pipe lines in, or use --file.",
        )
    return sys.stdin.buffer


def _score_lines(llm: LLM, lines: IO[bytes], options: _Options, common: CommonOptions) -> int:
    """Write one line for each line read, in order; returns 1 if one of them is an error."""
    started_s, count, has_errors = time.perf_counter(), 0, False
    with lines, ProgressReporter(is_quiet=common.quiet) as report:
        while line := lines.readline(MAX_LINE_BYTES + 1):
            if not line.strip():
                continue
            try:
                asked = _read_line(line, lines)
                output = _score(llm, asked, options, report)
            except TiercelError as error:
                has_errors = True
                message = f"{error} {error.hint}".strip()
                answer: dict[str, Any] = {"error": {"message": message, "code": error.code}}
            else:
                count += len(output.probs)
                order = _best_first(output, options.top)
                answer = {
                    "scores": [_numbers(row) for row in output.probs.tolist()],
                    "logprobs": [_numbers(row) for row in output.logprobs.tolist()],
                    "order": order,
                    "errors": {str(number): text for number, text in output.errors.items()},
                    "usage": _usage(output),
                }
            write(json_module.dumps(answer) + "\n")
    _note_speed(count, time.perf_counter() - started_s, common)
    return int(has_errors)


def _read_line(line: bytes, lines: IO[bytes]) -> dict[str, Any]:
    """The request in a line.

    Raises:
        ArgumentError: it is not an object with a query and items, or has an unknown field.
    """
    from tiercel.errors import ArgumentError

    if len(line) > MAX_LINE_BYTES:
        while line and not line.endswith(b"\n"):
            line = lines.readline(MAX_LINE_BYTES)
        raise ArgumentError(f"the line is over {MAX_LINE_BYTES} bytes.", hint="Split its items.")
    try:
        asked = json_module.loads(line)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"the line is not JSON: {error!s:.200}.") from error
    known = ", ".join(_FIELDS)
    if not isinstance(asked, dict):
        raise ArgumentError("the line is not a JSON object.", hint=f"Its fields are {known}.")
    for name in asked:
        if name not in _FIELDS:
            raise ArgumentError(f"{name!r:.80} is not a field.", hint=f"Fields are {known}.")
    for name in ("query", "items"):
        if name not in asked:
            raise ArgumentError(f"{name} is missing.", hint="Give query and items.", param=name)
    if not isinstance(asked["items"], str | list):
        raise ArgumentError("items is neither a text nor a list.", param="items")
    return asked
