"""Runs `tests/bench/gpu_kernels` in Triton's interpreter, in a process of its own; and the bench's own kernels through
the compiler of a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.on_gpu.ceilings import BLOCK, EACH
from bench.on_gpu.kernels import nothing, read_blocks
from tests.model.gpu.ahead import compile_for

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU")
@pytest.mark.slow
def test_sections_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "tests/bench/gpu_kernels"],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=290,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.slow
def test_kernels_compile() -> None:
    made = compile_for(90, read_blocks, {"source": "*i32", "out": "*i32"}, {"BLOCK": BLOCK, "EACH": EACH})
    assert made.spilled == 0
    assert "ld.global.v4" in made.assembly, "16 bytes are read at a time"
    assert compile_for(90, nothing, {"out": "*i32"}, {}).spilled == 0
