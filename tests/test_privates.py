"""Tests use public names: where one reaches into privates, it is here with the reason.

Planted faults are exempt, by two rules. `tests.support.planted.plant` may name a private function. A function outside
a class whose first parameter is `self` stands in for a method of the product, and sees what that method sees.

A class of the tests may use its own privates, and those of its base class unless that is the product's.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PRODUCT = ("cache_manager", "scheduler", "model", "rpc", "quire")
NAMEDTUPLE = {"_asdict", "_fields", "_replace"}  # public, despite their names
LEFT = {
    # Corruptions that the ledger must find: nothing else can make them.
    ("cache_manager/test_ledger.py", "manager.allocator._stack"),
    ("cache_manager/test_ledger.py", "manager.prefix.index._node_of_hash"),
    # One page of one group is evicted. The order of capacity evictions would take others first.
    ("cache_manager/test_windows.py", "manager.prefix._evict_slid"),
    # Two ways to one answer, of which only one is called from outside.
    ("model/test_closing.py", "COMPLETIONS._search"),
    ("model/test_closing.py", "COMPLETIONS._walk"),
    # torch's product in float8 has no public name.
    ("model/gpu/kernels/test_float8_product.py", "setattr(torch, _scaled_mm)"),
    ("model/gpu/kernels/test_float8_product.py", "torch.ops.aten._scaled_mm"),
    # A product that takes the way of a GPU, on the CPU.
    ("model/test_quantization.py", "layer._on_cpu"),
    ("model/test_quantization.py", "layer._scratch"),
    ("model/test_quantization.py", "layer._scratch._room"),
    # A planted fault that is a class: a rank that is slow to read, and one that writes where others read.
    ("model/parallel/test_collectives.py", "super()._exchanged"),
    # Privates of other projects.
    ("bench/test_gpu.py", "setattr(torch.cuda, _sleep)"),
    ("model/gpu/test_launch.py", "setattr(runtime.driver, _active)"),
    ("model/hostile.py", "os._exit"),
    ("rpc/test_offline.py", "os._exit"),
    ("support/rank_faults.py", "group._allgather_base"),
    ("support/rank_faults.py", "self._group._allgather_base"),
    # How multiprocessing, too, ends what it forks.
    ("support/quire_command.py", "os._exit"),
    ("support/quire_command.py", "threading._shutdown"),
    ("support/quire_command.py", "atexit._run_exitfuncs"),
}


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-z]\w*", name) is not None and name not in NAMEDTUPLE


def root_of(node: ast.expr) -> str:
    """Returns the name that a chain of attributes begins with, "" for another expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and root_of(node.func) == "super"


def first_parameter(node: ast.AST) -> str:
    parameters = node.args.args if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else []
    return parameters[0].arg if parameters else ""


def imported_from_product(tree: ast.AST) -> set[str]:
    """Returns the names that a module imports from the product."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {
        one.asname or one.name for node in imports if (node.module or "").split(".")[0] in PRODUCT for one in node.names
    }


def reaches_of(text: str) -> list[str]:
    tree = ast.parse(text)
    return list(reaches(tree, imported_from_product(tree)))


def reaches(
    node: ast.AST,
    product: set[str],
    in_class: bool = False,
    own: str = "",
    stands_in: bool = False,
    derived: bool = False,
) -> Iterator[str]:
    """Yields accesses to the privates of other objects.

    Args:
        node: Where to look.
        product: Names of the product's.
        in_class: Whether it is the body of a class.
        own: Name of the first parameter of the method around it, "" for none.
        stands_in: Whether it is within a function that stands in for a method.
        derived: Whether it is within a class that is derived from one of the product.
    """
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ImportFrom(module=module, names=names):
                yield from (f"{module}.{one.name}" for one in names if is_private(one.name))
            case ast.Attribute(value=value, attr=name) if is_private(name):
                is_own = isinstance(value, ast.Name) and value.id == own
                is_bases = is_super(value) and not derived
                if not (is_own or is_bases or (stands_in and root_of(value) == "self")):
                    yield ast.unparse(child)
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[target, ast.Constant(value=str(name)), *_]):
                if is_private(name):
                    yield f"setattr({ast.unparse(target)}, {name})"
        first = first_parameter(child)
        if isinstance(child, ast.ClassDef):
            yield from reaches(
                child, product, in_class=True, derived=any(root_of(base) in product for base in child.bases)
            )
        elif first and in_class:
            yield from reaches(child, product, own=first, derived=derived)
        else:
            yield from reaches(
                child, product, own=own, stands_in=stands_in or (first == "self" and not own), derived=derived
            )


def test_tests_reach_into_the_privates_that_are_listed_and_no_others() -> None:
    found = {
        (path.relative_to(TESTS).as_posix(), access)
        for path in TESTS.rglob("*.py")
        for access in reaches_of(path.read_text())
    }
    assert found == LEFT


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from scheduler.rows import _full", ["scheduler.rows._full"]),
        ("rig.engine._wake = 1", ["rig.engine._wake"]),
        ("from torch import nn\nnn.__name__\none._replace(a=1)", []),
        ("monkeypatch.setattr(Engine, '_take', 1)", ["setattr(Engine, _take)"]),
        ("plant(monkeypatch, Engine, '_take', lambda real: lambda self: real(self) or self._inbox)", []),
        ("def take(self, other): return self._a.b._c + other._d", ["other._d"]),
        ("class A:\n def b(self, x): return self._c, super()._d(), self.e._f, x._g", ["self.e._f", "x._g"]),
        ("class A:\n def b(self): return lambda: self._c", []),
        ("from scheduler.rows import Rows\nclass A(Rows):\n def b(self): super()._c(), self._d", ["super()._c"]),
    ],
)
def test_a_reach_is_seen(text: str, expected: list[str]) -> None:
    assert sorted(reaches_of(text)) == sorted(expected)
