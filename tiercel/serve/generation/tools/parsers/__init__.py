"""Parsers of tool calls in a model's text, one file a format.

`parser.py` is what they share; `format.py` says what a format is.
"""
