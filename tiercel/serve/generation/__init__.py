"""Generation for any API: prompts, structured output, and output split into events.

A route makes a `GenerationRequest`, and `generation.py` runs it and returns deltas of events
(reasoning, content, tool calls), which the route writes in its own format.
"""
