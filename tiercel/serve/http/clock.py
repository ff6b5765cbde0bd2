"""The wall clock, for the eyes of clients alone: it may jump, so no duration comes from it."""

from __future__ import annotations

from datetime import UTC, datetime


def created_now() -> int:
    """Seconds since 1970."""
    return int(datetime.now(UTC).timestamp())
