"""Kernels for GPUs, in Triton. Imported only where they are to run: nothing else of Quire needs Triton."""
