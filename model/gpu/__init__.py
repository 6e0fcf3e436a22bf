"""GPU back end: kernels in Triton, and the plans and CUDA graphs that run them.

Imported only where kernels are to run: nothing else of Quire needs Triton.
"""
