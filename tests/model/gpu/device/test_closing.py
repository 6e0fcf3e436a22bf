"""An engine that is closed leaves the device's memory to others, though a program keeps it."""

import gc
from pathlib import Path

import torch

from tests.model.gpu.device.engine import PROMPTS, on_device, run
from tests.model.gpu.device.place import needs_cuda

POOL_TOKENS = 2**19  # of 1 KiB each


@needs_cuda
def test_another_process_may_have_the_memory_of_a_closed_engine(dense: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    rig = on_device(dense, pool_tokens=POOL_TOKENS)
    run(rig, PROMPTS)
    took = torch.cuda.memory_reserved() - before
    assert took > POOL_TOKENS * 1024
    rig.loaded.runner.close()
    # Workspaces of cuBLAS stay.
    assert torch.cuda.memory_reserved() - before < took / 2
