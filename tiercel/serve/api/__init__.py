"""The routes: request types, their checks, and the wire format of responses.

`openai/`, `anthropic/` and `scoring/` hold one API each. All of them generate through
`generation/generation.py` or score through `scoring/score_jobs.py`.
"""
