"""Every error that Tiercel raises on purpose.

A message says what was wrong with the value; `hint` says what would be right. Only `cli/` and
`serve/` turn an error into text for the user, so nothing here prints. All classes can be pickled
and carry the HTTP status that the server answers with.
"""

from __future__ import annotations


class TiercelError(Exception):
    """Base class of all errors.

    Attributes:
        http_status: the HTTP status of the server's answer.
        code: the stable, machine-readable name of the error.
        hint: one sentence that says what would be right; may be empty.
        retry_after_s: whole seconds after which a retry may succeed; None: a retry does not help.
        is_final: whether a client that retries by itself must not retry this request.
    """

    http_status = 500
    code = "internal_error"
    retry_after_s: int | None = None
    is_final = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class InvalidRequestError(TiercelError):
    """A request that cannot be answered; `param` names the field."""

    http_status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, hint: str = "", param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt and answer together, do not fit the context."""

    code = "context_length_exceeded"


class ArgumentError(TiercelError, ValueError):
    """An invalid argument of an op, of the Python API, or of an environment variable.

    `param` names the field of a request, if the argument came from one.
    """

    http_status = 400
    code = "invalid_argument"

    def __init__(self, message: str, *, hint: str = "", param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ModelNotFoundError(TiercelError):
    """There is no model of that name or path, or it could not be downloaded."""

    http_status = 404
    code = "model_not_found"


class ModelFormatError(TiercelError):
    """A model file that breaks its format: the message names field, value and rule."""

    http_status = 400
    code = "invalid_model"


class UnsupportedModelError(TiercelError):
    """A valid model file with contents that Tiercel does not run."""

    http_status = 400
    code = "unsupported_model"


class QueueFullError(TiercelError):
    """More requests are waiting than the server accepts; retry later."""

    http_status = 429
    code = "queue_full"
    retry_after_s = 1


class EngineDeadError(TiercelError):
    """The engine process ended during a request, or is not ready again yet."""

    http_status = 503
    code = "engine_restarting"
    retry_after_s: int | None = 1


class NoHostError(TiercelError):
    """No host of a cluster takes an engine now: the message says what was waited for."""

    http_status = 503
    code = "engine_restarting"
    retry_after_s: int | None = 1


class EngineDiedTwiceError(TiercelError):
    """Two engines ended while they worked on the same request: it may end a third one."""

    http_status = 500
    code = "engine_died_twice"
    is_final = True


class RankLostError(TiercelError):
    """Another process of a group did not answer: the message names what was waited for."""

    http_status = 503
    code = "engine_restarting"
    retry_after_s: int | None = 1


class OutOfMemoryError(TiercelError):
    """Something does not fit into memory: the message says how much is needed and what to lower."""

    http_status = 500
    code = "out_of_memory"


class InstallationError(TiercelError):
    """A package that Tiercel needs is missing: a retry does not help."""

    code = "broken_installation"

    @classmethod
    def of(cls, error: ModuleNotFoundError) -> InstallationError:
        """Describe an import that failed."""
        return cls(
            f"the Python package of module {error.name or str(error)!r} is missing.",
            hint="Install Tiercel again with pip; --verbose shows what needs the package.",
        )


class BenchError(TiercelError):
    """A measurement that cannot continue: the message says what the server did."""

    code = "bench_failed"


class InternalError(TiercelError):
    """A fault in Tiercel."""

    http_status = 500
    code = "internal_error"
