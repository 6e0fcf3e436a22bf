"""A class name is used once in the product, so that a search for it finds one class."""

import ast
from collections import defaultdict
from pathlib import Path

PRODUCT = ("cache_manager", "model", "rpc", "scheduler")
ROOT = Path(__file__).parents[1]


def test_a_class_name_is_used_once() -> None:
    places = defaultdict(list)
    for file in (file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(file.relative_to(ROOT)))
    assert len(places) > 500
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
