"""The packages that the pages tell people to install are there under these names."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from rpc.distribution import NAME, how_to_install

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = [ROOT / "README.md", ROOT / "Makefile"] + [
    path
    for folder in ("docs", "deploy", "rpc", "model", "bench")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".md", ".py", ".yaml", ".yml", ".toml") or path.name == "Dockerfile"
]


def test_no_text_names_the_distribution_of_somebody_else() -> None:
    assert PROJECT["name"] == NAME
    wrong = [str(path) for path in TEXTS if re.search(r"quire\[|pip install '?quire\b", path.read_text())]
    assert wrong == []


def test_extras_that_texts_name_exist() -> None:
    named = {name for path in TEXTS for name in re.findall(r"EXTRAS=([a-z]+)", path.read_text())}
    named |= {name for path in TEXTS for name in re.findall(r"how_to_install\([\"']([a-z]+)", path.read_text())}
    assert {"bench", "plots", "tracing"} <= named <= set(PROJECT["optional-dependencies"])
    assert how_to_install("bench") == "in Quire's checkout `make setup EXTRAS=bench` installs it"


@pytest.mark.parametrize(
    ("extras", "installed"), [("", "."), ("tracing", ".[tracing]"), ("bench,plots", ".[bench,plots]")]
)
def test_set_up_installs_the_extras_that_it_is_given(extras: str, installed: str, tmp_path: Path) -> None:
    command = ["make", "--dry-run", "setup", f"VENV={tmp_path}/v", f"EXTRAS={extras}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(rf"-e '?{re.escape(installed)}'?\n", done.stdout)
    stamps = re.findall(r"touch (\S+/\.quire\S*)", done.stdout)
    assert len(stamps) == 1, "another set of extras is another target"
    assert stamps[0].endswith(extras)


def test_what_the_readme_shows_needs_no_extra() -> None:
    needed = {re.split(r"[^\w-]", one, maxsplit=1)[0] for one in PROJECT["dependencies"]}
    assert {"starlette", "uvicorn", "h11", "pydantic"} <= needed
