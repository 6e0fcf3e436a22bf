"""Models: checkpoints, architectures, attention back ends, the KV pool's bytes, sampling and the runner of a step.

Knows the scheduler by its contract alone (request, events, step, controls), and no network beside its rank groups.
"""

import os

# OpenMP reads this when torch loads it, so it is set first. By default threads spin at the end of each parallel region:
# with another process on the same cores a step of 16 sequences then took 47 to 526 ms, with PASSIVE 16 to 22 ms.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# With AMX tiles the bits of a row of oneDNN's bfloat16 products depend on the rows beside it (Sapphire Rapids: 16 of
# 300 rows of 576 x 1536). That would break the law that a request's logits do not depend on its batch. This excludes
# AMX and AVX512-FP16, and changes nothing on CPUs without them. Quire's own kernels do not use oneDNN: those with tiles
# (`model.cpu.kernels.tiles`) keep the law.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
