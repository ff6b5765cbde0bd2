"""Speculative decoding: who drafts (n-gram, MTP, hybrid), and when verifying drafts is worth it.

A proposer writes draft tokens into the engine's rows on the device; `ops/verify_accept.py` decides
which of them stay.
"""
