"""Kernels of the CPU back end, compiled when they are first needed. No C compiler, no shared library of our own."""
