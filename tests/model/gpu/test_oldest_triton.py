"""Kernels compile and run with the oldest Triton that Quire allows too: who has an older torch with CUDA has that one.

`make test-slow` installs it into a folder of its own, which these tests put before the environment's.
"""

import re
import subprocess
import sys
import tomllib

import pytest
import triton

from tests.support.interpreted import ROOT, SECONDS, check_apart, check_interpreted

OLDEST = "3.6.0"
FOLDER = ROOT / f"build/triton-{OLDEST}"
CHOSEN = (
    "not latent and (128-90 or eight-256-90 or 90-ProductTiles or qwen3 and 90 or kernels and 90 or orders and 90"
    " or 256-90 and joining or norms or sampler or gates)"
)
"""Tests of each kind of kernel for compute capability 9.0, with the attention that spills most."""
ENVIRONMENT = {"PYTHONPATH": str(FOLDER), "TEST_PART": ""}
needed = pytest.mark.skipif(
    not (FOLDER / ".installed").exists() or triton.__version__ == OLDEST,
    reason=f"Triton {OLDEST} is not in {FOLDER.relative_to(ROOT)} (make test-slow installs it), or is the only one",
)


def test_it_is_the_oldest_that_is_allowed_and_that_is_installed() -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (range_,) = (re.match(r"triton>=([\d.]+),", need) for need in needs if need.startswith("triton>"))
    assert range_ is not None
    assert f"{range_[1]}.0" == OLDEST
    assert f"OLDEST_TRITON := {OLDEST}\n" in (ROOT / "Makefile").read_text()


@needed
@pytest.mark.slow
def test_its_folder_comes_first() -> None:
    command = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == OLDEST


@needed
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_kernels_compile() -> None:
    files = sorted(str(file) for file in (ROOT / "tests/model/gpu").glob("test_ahead*.py") if "amd" not in file.name)
    check_apart(*files, "-k", CHOSEN, environment=ENVIRONMENT)


@needed
@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_rows_run_in_its_interpreter() -> None:
    """With numpy 2.4 it can run no kernel with a loop whose number of rounds is computed, as the others have."""
    check_interpreted("tests/model/gpu/kernels/test_parts.py", environment=ENVIRONMENT)
