r"""Server-sent events: the bytes of one event, whatever characters its text holds.

An event is lines of ``field: value`` up to an empty line. JSON escapes CR and LF, so a `data` line
cannot be cut there. Some clients split on every line break of Unicode; the three that JSON leaves
as they are (U+0085, U+2028, U+2029) are written as ``\uXXXX`` too.

Source: HTML living standard, section 9.2 (server-sent events).
"""

from __future__ import annotations

from typing import Final

import msgspec

HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx: pass each event on immediately
)
KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
_ENCODER: Final = msgspec.json.Encoder()
_LINE_BREAKS: Final = (
    ("\u0085".encode(), b"\\u0085"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)


def encode_event(value: object, name: str = "") -> bytes:
    """One event.

    Args:
        value: value that `msgspec.json` can encode; it becomes the one `data` line.
        name: value of the `event` field; "" leaves it out.
    """
    data = _ENCODER.encode(value)
    if not data.isascii():
        for raw, escaped in _LINE_BREAKS:
            data = data.replace(raw, escaped)
    if name:
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
    return b"data: %b\n\n" % data
