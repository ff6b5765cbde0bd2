"""Oracle of the product of many tokens with a K-quantised matrix: it is that of few tokens."""

from tiercel.reference.packed_matvec import q4k_matvec as q4k_gemm

__all__ = ["q4k_gemm"]
