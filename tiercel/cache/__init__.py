"""The paged KV cache: specs of what a layer keeps, blocks and their reference counts, prefix cache.

A block is a number of tokens across all layers of a cache group. The manager plans on the host and
needs no PyTorch; only `pool.py` holds device memory.
"""
