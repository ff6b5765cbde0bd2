"""Models: the interface that the engine knows (`model.py`), and what implements it.

A family (`llama.py`, `qwen3.py`, `gemma3.py`) is data, free of PyTorch, so that a file is judged
before PyTorch is imported; `decoder.py` is the forward pass that dense families share.
"""
