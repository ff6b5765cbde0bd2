"""Named columns of the result table of `verify_accept`, (R, K + 4) int32, for R rows and K drafts.

A row of the table holds 1 + K token ids, then these columns. The kernel and the CPU code of the op
write them, and the runner reads them on the host, after one copy.
"""

from __future__ import annotations

from typing import Final

NUM_NEW: Final = 0
"""Number of the token ids that count, 1 or more."""

PROBLEM: Final = 1
"""Problem of the first token, or `UNSOUND_DRAFT`."""

NUM_VERIFIED: Final = 2
"""Number of drafts that were verified."""

NUM_COLUMNS: Final = 3
"""Columns after the token ids."""
