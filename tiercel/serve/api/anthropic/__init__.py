"""Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`.

Its messages become those of `generation/`; its answer is a list of blocks.
"""
