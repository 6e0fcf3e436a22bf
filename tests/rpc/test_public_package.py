"""`quire`, the public package: what it exports, and what it says where another module hides a package of Quire."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import quire

from tests.support.server import clean_environment

ROOT = Path(__file__).parents[2]
INTERNAL = re.compile(r"^\s*(?:from|import) (?:rpc|scheduler|model|cache_manager)\b.*", re.MULTILINE)


def run(directory: Path, *command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=directory, capture_output=True, text=True, timeout=60,
        env=clean_environment() | environment,
    )  # fmt: skip


def run_script(directory: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = directory / "script.py"
    script.write_text(text)
    return run(directory, sys.executable, script)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("model.py", "LLM"),
        ("model/__init__.py", "LLM"),
        ("scheduler.py", "Sampling"),
        ("cache_manager.py", "InvalidRequest"),
        ("rpc.py", "RequestFailed"),
        ("rpc.py", "Client"),
    ],
)
def test_a_module_that_hides_a_package_is_named(file: str, name: str, tmp_path: Path) -> None:
    hiding = tmp_path / file
    hiding.parent.mkdir(exist_ok=True)
    hiding.write_text("print('imported')")
    done = run_script(tmp_path, f"from quire import {name}")
    shown = hiding.parent if hiding.name == "__init__.py" else hiding
    package = file.split("/")[0].removesuffix(".py")
    assert f"ImportError: {shown} hides Quire's package '{package}'" in done.stderr
    assert "Rename it" in done.stderr
    assert "imported" not in done.stdout, "a user's module runs only where the user imports it"


def test_a_module_that_was_imported_before_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("weights = 1")
    done = run_script(tmp_path, "import model\nimport quire\nquire.LLM")
    assert f"ImportError: {tmp_path / 'model.py'} hides" in done.stderr
    done = run_script(
        tmp_path, "import sys, types\nsys.modules['rpc'] = types.ModuleType('rpc')\nfrom quire import Stopping"
    )
    assert "ImportError: " in done.stderr
    assert "hides Quire's package" in done.stderr


def test_messages_and_clients_need_no_engine(tmp_path: Path) -> None:
    """A program that uses a server may have a `model.py`."""
    (tmp_path / "model.py").write_text("weights = 1")
    done = run_script(
        tmp_path,
        "import model, quire.v1.generation_service_pb2, sys\nfrom quire import AsyncClient, Client\n"
        "assert model.weights == 1 and 'torch' not in sys.modules",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [["-m", "quire"], [Path(sys.executable).with_name("quire")]])
def test_the_command_names_it_in_one_line(command: list[str | Path], tmp_path: Path) -> None:
    found = run(tmp_path, sys.executable, *command, "--version")
    assert (found.returncode, found.stdout) == (0, f"quire {quire.__version__}\n"), found.stderr
    (tmp_path / "rpc.py").write_text("")
    hidden = run(tmp_path, sys.executable, *command, "--version", PYTHONPATH=str(tmp_path))
    assert hidden.returncode == 1
    assert hidden.stderr.startswith(f"quire: {tmp_path / 'rpc.py'} hides Quire's package 'rpc'")
    assert hidden.stderr.count("\n") == 1


def test_all_that_is_exported_is_there() -> None:
    for name in quire.__all__:
        assert getattr(quire, name) is not None
    assert quire.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        getattr(quire, "Nothing")  # noqa: B009
    with pytest.raises(ValueError, match="temperature") as refused:
        quire.Sampling(temperature=9)
    assert isinstance(refused.value, quire.InvalidRequest)


def test_the_import_costs_a_client_little(tmp_path: Path) -> None:
    """`import quire` loads the standard library alone, a client no torch."""
    done = run_script(
        tmp_path,
        "import json, sys\nbefore = set(sys.modules)\nimport quire\nafter = set(sys.modules) - before\n"
        "from quire import Client\nprint(json.dumps([sorted(after), 'grpc' in sys.modules, 'torch' in sys.modules]))",
    )
    assert done.returncode == 0, done.stderr
    loaded, grpc, torch = json.loads(done.stdout)
    assert {name.partition(".")[0] for name in loaded} - {"quire"} <= sys.stdlib_module_names
    assert (grpc, torch) == (True, False)


def test_type_checkers_see_what_is_there() -> None:
    """The imports that only a type checker reads name the objects that a program gets."""
    tree = ast.parse(Path(quire.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    assert homes.keys() >= set(quire.__all__) - {"__version__"}
    for name in set(quire.__all__) - {"__version__"}:
        assert getattr(sys.modules[homes[name]], name) is getattr(quire, name)
    assert set(dir(quire)) == set(quire.__all__)


@pytest.mark.parametrize("place", ["README.md", "docs/*.md", "deploy/README.md", "examples/*"])
def test_what_users_read_imports_quire_alone(place: str) -> None:
    files = list(ROOT.glob(place))
    assert files
    assert {str(file): INTERNAL.findall(file.read_text()) for file in files if INTERNAL.search(file.read_text())} == {}
