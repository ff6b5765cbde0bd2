"""Tool calls: which format a model writes them in, how they are forced and parsed.

`parsers/` has a file for each format.
"""
