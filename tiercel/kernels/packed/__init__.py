"""Products with quantised weights that stay packed in memory, for twelve GGUF types.

By rows of x: `packed_matvec` up to 16, `packed_gemm` and `packed_mmq` above, `packed_dequantize`
before a dense product. `packed_repack` lays the planes out.
"""
