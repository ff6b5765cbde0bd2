"""Child process that loads a tokenizer file before the engine does, so that a crash stays in it.

Standard input: one line of JSON, then the tokenizer JSON. Exit status 0: it loads. With ``probe``
set it also encodes texts that make a careless regular expression take exponential time; the
parent's clock decides.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping

_RUN = 4096  # characters; quadratic work stays in milliseconds, exponential work never ends
_PROBE_UNITS = (
    " ",
    "a",
    "\u00e9",
    "1",
    "!",
    "\n",
    "\r\n",
    "\t",
    "aA",
    "a1",
    "a ",
    " !",
    "\u4e2d",
    "\u0301",
)


def _set_limits(settings: Mapping[str, int]) -> None:
    import resource  # noqa: PLC0415 - not every platform has it

    for limit, name in ((settings["cpu_s"], resource.RLIMIT_CPU), (0, resource.RLIMIT_CORE)):
        resource.setrlimit(name, (limit, limit))
    resource.setrlimit(resource.RLIMIT_DATA, (settings["data_bytes"],) * 2)


def main() -> None:
    """Load, probe, exit; an exception becomes the last line of standard error."""
    settings = json.loads(sys.stdin.buffer.readline())
    sys.path.extend(sys.argv[1:])
    from tokenizers import Tokenizer  # noqa: PLC0415 - the path is an argument

    with contextlib.suppress(ImportError):  # without limits only the parent's clock decides
        _set_limits(settings)
    tokenizer = Tokenizer.from_str(sys.stdin.buffer.read().decode())
    tokenizer.encode("Hello, world!")
    if settings["probe"]:
        for unit in _PROBE_UNITS:
            tokenizer.encode(unit * (_RUN // len(unit)))
            tokenizer.encode(unit * (_RUN // len(unit)) + "\x00")


if __name__ == "__main__":
    main()
