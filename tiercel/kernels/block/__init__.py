"""Weights in block formats (E4M3 and E2M1 with scales beside them): decoded, and multiplied.

`block_matvec` multiplies some tokens by weights as stored, `block_dequantize` decodes them before
a dense product. `block_numbers` has the formats' numbers as device functions.
"""
