"""Tensors: checkpoints, architectures, attention back ends, the KV pool's bytes, sampling, and the runner of a step."""

import os

# OpenMP reads this when torch loads it, so it is set before. Its default is to spin at the end of each parallel region:
# with another process on the same cores a step of 16 sequences then took 47 to 526 ms, with this 16 to 22 ms.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
