"""Routes: each wire format in a folder, and the fields and answers that routes share.

A route reads its body, takes the one way of `generation/` or of `scoring/`, and writes its answer.
"""
