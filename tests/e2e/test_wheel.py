"""The wheel carries all that it needs: installed into a fresh environment, it serves outside the tree."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_wheel_serves_outside_the_tree(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path / "dist"), str(ROOT)],
        check=True, timeout=300,
    )  # fmt: skip
    (wheel,) = (tmp_path / "dist").glob("quire_serving-*.whl")
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True, timeout=300)
    # The dependencies come from the environment that runs the tests; its editable Quire does not pass a .pth file.
    (site,) = home.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for package in ("quire", "rpc", "model", "scheduler", "cache_manager"):
        assert (site / package / "py.typed").is_file(), "type checkers would take its names for Any"
    script = (
        "import quire, rpc, sys; assert rpc.__file__.startswith(sys.prefix), rpc.__file__\n"
        "from quire import LLM, Stopping\n"
        "from quire.v1 import generation_service_pb2\n"
        "assert generation_service_pb2.__file__.startswith(sys.prefix), generation_service_pb2.__file__\n"
        "stopping = Stopping(max_tokens=4, ignore_eos=True)\n"
        "with LLM() as llm: print(len(llm.generate('ROMEO:', stopping=stopping)[0].token_ids))"
    )
    done = subprocess.run([python, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "4\n", done.stderr
    version = subprocess.run([home / "bin" / "quire", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert version.stdout.startswith("quire 0.")
