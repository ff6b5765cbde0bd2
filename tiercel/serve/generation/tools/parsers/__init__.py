"""Tool-call parsers, one file per family of formats.

Hermes, Qwen 2.5 and Llama 3 are in `json_calls.py`, Qwen3-Coder and DeepSeek V3.2 in
`tagged_calls.py`, Llama 4 in `pythonic.py`. Each format reads calls from text and writes the
grammar that enforces them.
"""
