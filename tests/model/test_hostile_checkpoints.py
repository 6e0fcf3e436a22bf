"""Mutated checkpoints are served or refused with a message of some length: no hang, no traceback, no gigabytes."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.model.hostile import CHANGES
from tests.support.checkpoints import write_llama

ROOT = Path(__file__).parents[2]
LONGEST = 2000  # characters of a message


def check(directory: Path, first: int, count: int, module: str = "tests.model.hostile") -> None:
    base = write_llama(directory, num_hidden_layers=2)
    command = [sys.executable, "-m", module, str(base), str(first), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == count, done.stderr[-2000:]
    wrong = [r for r in results if r["outcome"] not in ("served", "CheckpointError") or len(r["message"]) > LONGEST]
    assert wrong == []
    assert all(result["message"].isprintable() for result in results)
    outcomes = Counter(result["outcome"] for result in results)
    assert min(outcomes["served"], outcomes["CheckpointError"]) > count // 20, "the mutations are too mild or too wild"


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_mutated_checkpoints_are_served_or_refused(tmp_path: Path) -> None:
    check(tmp_path / "m", 0, 4 * len(CHANGES))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_more_mutated_checkpoints_are_served_or_refused(tmp_path: Path) -> None:
    check(tmp_path / "m", 1000, 70 * len(CHANGES))
