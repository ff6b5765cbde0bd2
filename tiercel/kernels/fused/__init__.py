"""Kernels that fuse what a layer does between large products, up to a whole decode step.

`rms_norm` and `act_mul` fuse neighbours; `fused_layer_tail` runs from one attention to the next for
up to 16 tokens; `fused_decode_step` runs all layers for one token.
"""
