"""Runs `tests/model/gpu/kernels` in Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from tests.support.interpreted import ROOT, SECONDS, check_interpreted

FOLDER = Path("tests/model/gpu/kernels")
MODELS, RANKS = ("test_model.py", "test_working_memory.py"), ("test_ranks.py",)
"""Files with whole models, which take most of the time."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU")
@pytest.mark.timeout(SECONDS)
@pytest.mark.slow
@pytest.mark.every_part
@pytest.mark.parametrize("part", ["kernels", "models", "ranks"])
def test_kernels_in_the_interpreter(part: str) -> None:
    apart = {"models": MODELS, "ranks": RANKS}
    others = {file.name for file in (ROOT / FOLDER).glob("test_*.py")}.difference(*apart.values())
    check_interpreted(*(str(FOLDER / file) for file in apart.get(part, sorted(others))))
