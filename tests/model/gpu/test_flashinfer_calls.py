"""What the tests' stub of FlashInfer takes, FlashInfer takes too, by its code: it cannot run without a GPU.

`make test-slow` fetches it.
"""

import ast
import re
import tomllib
from inspect import Parameter, signature
from zipfile import ZipFile

import pytest

from tests.model.gpu.kernels.flashinfer_stub import StubPrefill
from tests.support.interpreted import ROOT

VERSION = "0.7.4"
FOLDER = ROOT / f"build/flashinfer-{VERSION}"
WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"


def test_it_is_the_oldest_that_is_allowed_and_that_is_fetched() -> None:
    (need,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["flashinfer"]
    found = re.match(r"flashinfer-python>=([\d.]+),", need)
    assert found is not None
    assert found[1] == VERSION
    assert f"FLASHINFER := {VERSION}\n" in (ROOT / "Makefile").read_text()


@pytest.fixture(scope="module")
def methods() -> dict[str, ast.arguments]:
    """Parameters of the wrapper's methods; of an overloaded one those of its code."""
    (wheel,) = FOLDER.glob("*.whl")
    code = ast.parse(ZipFile(wheel).read("flashinfer/prefill.py"))
    (made,) = (one for one in code.body if isinstance(one, ast.ClassDef) and one.name == WRAPPER)
    return {one.name: one.args for one in made.body if isinstance(one, ast.FunctionDef)}


@pytest.mark.skipif(
    not (FOLDER / ".fetched").exists(), reason=f"there is no {FOLDER.relative_to(ROOT)} (make test-slow fetches it)"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["__init__", "plan", "run"])
def test_its_calls_are_those_of_the_stub(name: str, methods: dict[str, ast.arguments]) -> None:
    there, here = methods[name], signature(getattr(StubPrefill, name)).parameters
    positional = [one.arg for one in there.args]
    without = positional[: len(positional) - len(there.defaults)]
    defaults = dict(zip(positional[len(without) :], there.defaults, strict=True))
    defaults |= {one.arg: value for one, value in zip(there.kwonlyargs, there.kw_defaults, strict=True) if value}
    assert set(without) <= set(here), "it needs more"
    given = [one.name for one in here.values() if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
    # What is given by place has its place; `backend` is given by name.
    assert [one for one in given if one != "backend"] == positional[: len(given) - ("backend" in given)]
    for own in here.values():
        assert own.name in positional or own.name in defaults
        if own.default is not Parameter.empty:
            assert ast.unparse(defaults[own.name]) == repr(own.default), own.name
