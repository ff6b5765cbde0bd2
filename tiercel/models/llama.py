"""Llama (also SmolLM2): the plain decoder.

    h = norm(x);  x = x + Wo attention(rope(Wq h), rope(Wk h), Wv h)
    h = norm(x);  x = x + Wdown(silu(Wgate h) * Wup h)

Its GGUF files hold the rows of Wq and Wk permuted for rotation of adjacent pairs; they are permuted
back at load, so that every family rotates the pairs (i, i + D/2).

Source: "LLaMA", arXiv 2302.13971; conversion in llama.cpp's convert_hf_to_gguf.py.
"""

from tiercel.models.config import Architecture

ARCHITECTURE = Architecture(name="llama", interleaved_gguf=True)
