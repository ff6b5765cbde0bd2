"""From a checked request to streamed output: prompts, the engine's tokens, reasoning, tool calls.

Every generating route takes this one way; routes differ in what they read and write.
"""
