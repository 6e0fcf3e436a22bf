"""These tests run kernels, see `tests/model/gpu/kernels`: without a GPU
`tests/bench/test_gpu_interpreted.py` runs them.
"""

from tests.model.gpu.kernels.device import CAN_RUN

collect_ignore_glob = [] if CAN_RUN else ["test_*.py"]
