"""`id` and `created` of the objects that the routes answer with."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime


def new_object_id(prefix: str) -> str:
    """An id that cannot be guessed."""
    return f"{prefix}{secrets.token_hex(16)}"


def created_now() -> int:
    """Seconds since 1970, for clients alone: the wall clock may jump, so it times nothing here."""
    return int(datetime.now(UTC).timestamp())
