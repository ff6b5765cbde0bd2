"""How device code is compiled, cached, loaded and launched: NVRTC for CUDA C++, and Triton.

Kernels of every family launch through these two modules; no kernel is here.
"""
