"""Attention over the paged cache (prefill, packed items, decode, verification), and what feeds it.

A prefill kernel takes chunks of any length, a decode kernel up to 16 new tokens a request.
"""
