"""Oracle of the product of many tokens with a K-quantised matrix: it is that of few tokens."""

from tiercel.reference.packed_matvec import packed_matvec as packed_gemm

__all__ = ["packed_gemm"]
