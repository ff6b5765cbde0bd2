"""Oracle of the norm into images: the norm itself, in float64."""

from tiercel.reference.rms_norm import rms_norm as packed_norm

__all__ = ["packed_norm"]
