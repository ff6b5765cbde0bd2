"""The device side of a step: inputs, row state, CUDA graphs, sampling and read-back.

Start with `runner.py`. Only what is common to every model may enter: a model is known by the
interface in `models/model.py`.
"""
