"""`tiercel convert`: a DeepSeek-V4 folder with MXFP4 experts, written anew with NVFP4 experts.

Standard output carries a line for each matrix that had to be rounded, then a summary. Refusals
that headers allow come without PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from tiercel.cli.options import CommonOptions
from tiercel.cli.terminal import ProgressReporter, one_line, write

_GROUP = Group("Conversion", sort_key=1)


def convert(
    folder: Annotated[Path, Parameter(group=_GROUP, help="DeepSeek-V4 folder, MXFP4 experts.")],
    out: Annotated[Path, Parameter(group=_GROUP, help="Folder to write.")],
    /,
    *,
    max_error: Annotated[
        float | None,
        Parameter(
            group=_GROUP,
            validator=Number(gte=0),
            help="Largest relative error of a matrix [any, with a report].",
        ),
    ] = None,
    force: Annotated[
        bool, Parameter(group=_GROUP, help="Replace OUT if it holds a model and nothing else.")
    ] = False,
    common: CommonOptions = CommonOptions(),  # noqa: B008 - frozen
) -> int:
    """Convert the MXFP4 experts of DeepSeek-V4 to NVFP4, in a new folder."""
    from tiercel.models.convert_plan import plan_conversion

    plan = plan_conversion(folder, out, can_replace=force)

    from tiercel.models.convert import check_rounded, find_rounded, write_model

    with ProgressReporter(is_quiet=common.quiet) as report:
        rounded = find_rounded(plan, report)
        if max_error is not None:
            check_rounded(plan, rounded, max_error)
        num_bytes = write_model(plan, report)
    for matrix in rounded:
        write(
            f"{one_line(matrix.tensor)}: rounded, scales span {matrix.span} powers of two, "
            f"largest error {matrix.max_error:.3g}, relative error {matrix.relative_error:.3g}\n"
        )
    exact = len(plan.matrices) - len(rounded)
    write(
        f"{plan.out}: {len(plan.matrices)} expert matrices in NVFP4, {exact} exactly and "
        f"{len(rounded)} rounded; {num_bytes / 1e9:.2f} GB\n"
    )
    return 0
