"""Operators: check, allocate, dispatch to a kernel on CUDA or to PyTorch on a CPU.

`<op>.py` is the operator, `<op>_torch.py` what it runs where no kernel of ours does. Each has an
oracle in `reference/`, a test in `tests/ops/` and a benchmark of the same name.
"""
