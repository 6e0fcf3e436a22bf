"""The CPU back end: all layers of a step as one program of kernels, compiled for the machine when first needed."""
