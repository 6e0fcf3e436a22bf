"""Tests that run in a process of their own: Triton's interpreter and its version are chosen as a process starts."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 1200  # on a Zen 3 163 alone, above 290 beside another worker


def check_interpreted(*arguments: str, environment: Mapping[str, str] | None = None) -> None:
    """Runs the tests of folders and files in Triton's interpreter, on a machine without a GPU."""
    check_apart(*arguments, environment={"TRITON_INTERPRET": "1", **(environment or {})})


def check_apart(*arguments: str, environment: Mapping[str, str]) -> None:
    """Runs tests in a process of their own.

    Args:
        arguments: Arguments of pytest: folders, files, options.
        environment: Variables that are set for them.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=SECONDS - 10
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
