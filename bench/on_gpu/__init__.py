"""Whether the path of kernels is right on a CUDA device, and how fast it is: one command, `python -m bench.gpu`."""
