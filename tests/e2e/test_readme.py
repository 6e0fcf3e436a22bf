"""The README's examples work as they stand, and so does the line of a batch on its page."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gateway import running_gateway
from tests.support.server import QUIRE, clean_environment, quire, running_server

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BATCH = (ROOT / "docs/guides/batch.md").read_text()
LINES = 150
LOSSES = ("LoRA", "Embeddings", "Separate prefill")


def test_it_is_short_and_says_its_status_at_once() -> None:
    assert len(README.splitlines()) <= LINES
    first_screen = README[: README.index("\n## ")]
    assert "not yet as fast as torch" in " ".join(first_screen.split())
    rows = [line for line in README.splitlines() if line.startswith("| ")]
    for name in LOSSES:
        (row,) = (row for row in rows if row.startswith(f"| {name}"))
        assert "○" in row.split("|")[2], row


def test_python_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) == 3
    with running_server() as server, running_gateway([server.address]) as gateway:
        for example in examples:
            script = example.replace("127.0.0.1:50051", server.address).replace("http://127.0.0.1:8000", gateway.url)
            done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            assert done.stdout  # the length is the model's: it draws, and may end an answer early


@pytest.mark.slow
def test_line_of_a_batch_gives_the_result_beside_it(tmp_path: Path) -> None:
    line, result, *_ = re.findall(r"```json\n(.*?)```", BATCH, re.DOTALL)
    (tmp_path / "in").write_text(line)
    command = [QUIRE, "batch", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=clean_environment())
    made, shown = json.loads((tmp_path / "out").read_text()), json.loads(result)
    logprobs = [token.pop("logprob") for values in (made, shown) for (token,) in values["logprobs"]]
    assert made == shown
    assert logprobs[:3] == pytest.approx(logprobs[3:], abs=0.05)  # the machine's, in bfloat16


def test_files_and_flags_that_it_names_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README):
        assert (ROOT / target).exists(), target
    helps = "".join(quire(command, "--help", COLUMNS="200").stdout for command in ("serve", "generate", "gateway"))
    helps += (ROOT / "bench/peers/__main__.py").read_text()
    for flag in set(re.findall(r"(--[a-z][a-z-]+)", README)):
        assert flag in helps, flag
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets
    assert all((ROOT / path).exists() for path in re.findall(r"`(tests/[\w/.]+)`", README))
