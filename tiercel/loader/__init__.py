"""Model files: readers of GGUF and safetensors, tensor names, model names to files, downloads.

Files come from strangers: every offset and count is checked against the file's size before use.
Free of PyTorch.
"""
