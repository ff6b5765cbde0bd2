"""Loading a model on as many ranks as its options ask for."""

from __future__ import annotations

from pathlib import Path

from tiercel.config import LoadOptions
from tiercel.engine.load import LoadedModel, Report, load_model
from tiercel.engine.peers import OnFailure
from tiercel.ipc.knock import Listener
from tiercel.models.source import ModelSource


def load_ranks(
    model: str | Path | ModelSource | None,
    options: LoadOptions,
    report: Report | None,
    on_failure: OnFailure | None = None,
    listener: Listener | None = None,
) -> LoadedModel:
    """Load a model on all ranks that the options ask for; this process is rank 0.

    Args:
        model: see `load_model`.
        options: see `load_model`.
        report: see `load_model`.
        on_failure: called on a thread of its own when another rank has failed, whatever this
            process is doing; steps and requests raise the same error.
        listener: where ranks of other hosts knock, with `options.ranks_per_host`.

    Raises:
        TiercelError: see `load_model`; or what another rank refused.
    """
    if options.tensor_parallel_size in (1, None):  # None is the default, as of every count
        return load_model(model, options, report)
    from tiercel.ipc.ranks import load_several  # one rank starts without it

    return load_several(model, options, report, on_failure, listener)
