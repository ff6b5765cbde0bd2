"""The command line: one file a subcommand, and what they share.

Only this package and `serve/` turn errors into text for people. Commands import lazily, so that
`--help` is instant.
"""
