"""Runs `tests/bench/gpu_kernels` in Triton's interpreter, and the bench's own kernels through the compiler of a GPU."""

import pytest
import torch

from bench.on_gpu.ceilings import BLOCK, EACH
from bench.on_gpu.kernels import nothing, read_blocks
from tests.model.gpu.ahead import compile_for
from tests.support.interpreted import SECONDS, check_interpreted


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU")
@pytest.mark.timeout(SECONDS)
@pytest.mark.slow
@pytest.mark.every_part
def test_sections_in_the_interpreter() -> None:
    check_interpreted("tests/bench/gpu_kernels")


@pytest.mark.slow
def test_kernels_compile() -> None:
    made = compile_for(90, read_blocks, {"source": "*i32", "out": "*i32"}, {"BLOCK": BLOCK, "EACH": EACH})
    assert made.spilled == 0
    assert "ld.global.v4" in made.assembly, "16 bytes are read at a time"
    assert compile_for(90, nothing, {"out": "*i32"}, {}).spilled == 0
