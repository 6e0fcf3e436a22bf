"""Kernels of the CPU back end, compiled when they are first needed. No C compiler, no shared library of our own.

Knows no layers and no plans: a kernel gets addresses and numbers.
"""
