"""Layers of models: they hold weights and call ops.

No shape juggling and no question about the device: both are the ops' business.
"""
