"""Routes that score instead of generate: `/v1/score`, `/rerank`, `/v1/decisions`.

`scoring.py` is the one way from a request to the values of its items.
"""
