"""Runs `tests/model/gpu/kernels` in Triton's interpreter."""

import pytest
import torch

from tests.support.interpreted import SECONDS, check_interpreted


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU")
@pytest.mark.timeout(SECONDS)
@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    check_interpreted("tests/model/gpu/kernels")
