"""Tests of Triton's kernels on a machine without a GPU: in the interpreter, which a process chooses as it starts."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 1200  # on a Zen 3 163 alone, above 290 beside another worker


def check_interpreted(*paths: str) -> None:
    """Runs the tests of folders and files in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *paths]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS - 10)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
