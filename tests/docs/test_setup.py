"""`make setup` shows what pip does, and once it is done says nothing more."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = """#!/bin/sh
echo "Requirement already satisfied: filelock in .venv/lib"
echo "Downloading $7-1.0.whl (70.2 MB)"
exit $STATUS
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """In place of a virtual environment: its python is a pip that installs nothing."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(PIP)
    (tmp_path / "bin" / "python").chmod(0o755)
    return tmp_path


def make(target: str, environment: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = ["make", target, f"VENV={environment}"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=variables | {"STATUS": str(status)}
    )


def test_what_is_downloaded_is_shown_and_what_is_there_is_not(environment: Path) -> None:
    done = make("setup-dev", environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(70.2 MB)\n") == 2
    assert "Requirement" not in done.stdout.partition("installing Quire")[2]
    again = make("setup-dev", environment).stdout
    assert "pip" not in again
    assert "installing" not in again


def test_an_installation_that_fails_is_tried_again(environment: Path) -> None:
    (environment / ".torch").touch()
    for _ in range(2):
        done = make("setup", environment, status=1)
        assert done.returncode == 2
        assert "Downloading" in done.stdout
    assert not (environment / ".quire").exists()
