"""Waiting in tests: as long as a busy machine may need, and no longer than necessary."""

import time

PATIENCE_S = 60


def wait_for(condition, seconds=PATIENCE_S):
    """Return as soon as the condition holds; fail if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened in {seconds} s"
        time.sleep(0.01)
