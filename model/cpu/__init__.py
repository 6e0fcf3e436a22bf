"""CPU back end: all layers of a step as one program of kernels, compiled for the machine when first needed.

`model.cpu.kernels` writes kernels; the files here turn a decoder and a step into calls of them.
"""
