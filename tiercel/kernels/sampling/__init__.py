"""The two ends of a step on the device: its inputs from the rows, and the next tokens.

`prepare_step` comes before the model's forward, `sample_tokens` after its logits.
"""
