"""Tensors: checkpoints, architectures, attention back ends, the KV pool's bytes, sampling, and the runner of a step."""

import os

# OpenMP reads this when torch loads it, so it is set before. Its default is to spin at the end of each parallel region:
# with another process on the same cores a step of 16 sequences then took 47 to 526 ms, with this 16 to 22 ms.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# With AMX tiles oneDNN's bfloat16 products give a row other bits beside other rows (Sapphire Rapids: 16 of 300
# rows of 576 x 1536), which would break the law that a request's logits do not depend on its batch. This leaves AMX and
# AVX512-FP16 out and changes nothing on CPUs without them. Quire's own kernels do not use oneDNN.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
