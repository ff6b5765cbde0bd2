"""Which requests run how many tokens in the next step, in which cache blocks.

Plans only: no device, no clock but the one passed in. Free of PyTorch.
"""
