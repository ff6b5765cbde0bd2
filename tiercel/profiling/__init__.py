"""Timings of a device: what its memory and tensor cores reach, and what a model's kernels take.

For `tiercel bench` and for the costs of verification that the engine measures at start.
"""
