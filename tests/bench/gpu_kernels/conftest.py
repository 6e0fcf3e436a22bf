"""These tests run kernels, see `tests/model/gpu/kernels`: without a GPU
`tests/bench/test_gpu_interpreted.py` runs them.
"""

import pytest

from tests.model.gpu.kernels.device import CAN_RUN

collect_ignore_glob = [] if CAN_RUN else ["test_*.py"]


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as a GPU has them, not packed for a CPU."""
    monkeypatch.setattr("model.layers.onednn_multiplies", lambda _: False)
