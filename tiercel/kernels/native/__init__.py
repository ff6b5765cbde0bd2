"""Kernels for processors: C sources, how they are built, and the library that is loaded."""
