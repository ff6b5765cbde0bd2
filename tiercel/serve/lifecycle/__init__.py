"""The life of the served model: start, rehearsal, readiness, and what the engine reports."""
