"""Sections of `python -m bench.gpu`: checks of the kernels on a CUDA device, and their speed."""
