"""Nothing in the product unpickles or evaluates: a checkpoint, a message or a file can never run code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cache_manager", "scheduler", "model", "rpc")
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    ("torch", "load"), ("yaml", "load"), ("yaml", "load_all"), ("yaml", "unsafe_load"), ("yaml", "full_load"),
    ("torch", "hub"), ("jit", "load"), ("builtins", "eval"), ("builtins", "exec"),
}  # fmt: skip
KEYWORDS = {"allow_pickle", "trust_remote_code"}


def uses(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that could run code from data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in MODULES:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            top = (node.module or "").split(".")
            if top[0] in MODULES:
                yield node.lineno, f"from {node.module}"
            for alias in node.names:
                if (top[-1], alias.name) in ATTRIBUTES:
                    yield node.lineno, f"from {node.module} import {alias.name}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield node.lineno, f"{node.func.id}()"
        elif isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if (name, node.attr) in ATTRIBUTES:
                yield node.lineno, f"{name}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg in KEYWORDS and ast.unparse(node.value) != "False":
            yield node.value.lineno, f"{node.arg}="


def test_product_code_has_none() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(paths) > 40
    found = [f"{path.relative_to(ROOT)}:{line}: {what}" for path in paths for line, what in uses(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import numpy, pickle as p",
        "from cloudpickle import loads",
        "import torch\ntorch.load(path)",
        "from torch import load",
        "def f():\n    return eval(text)",
        "exec(code)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
        "x = torch.jit.load",
    ],
)
def test_each_is_seen(source: str) -> None:
    assert list(uses(source))


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.load(f)",
        "model.eval()",
        "np.load(p, allow_pickle=False)",
        "re.compile('a')",
        "yaml.safe_load(t)",
    ],
)
def test_harmless_code_is_let_pass(source: str) -> None:
    assert not list(uses(source))
