"""Runs `tests/model/gpu/kernels` in Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from tests.support.interpreted import ROOT, SECONDS, check_interpreted

FOLDER = Path("tests/model/gpu/kernels")
MODELS = ("test_model.py", "test_working_memory.py")
"""Files with whole models, which take half of the time."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU")
@pytest.mark.timeout(SECONDS)
@pytest.mark.slow
@pytest.mark.every_part
@pytest.mark.parametrize("models", [False, True], ids=["kernels", "models"])
def test_kernels_in_the_interpreter(models: bool) -> None:
    files = sorted(file.name for file in (ROOT / FOLDER).glob("test_*.py"))
    check_interpreted(*(str(FOLDER / file) for file in files if (file in MODELS) == models))
