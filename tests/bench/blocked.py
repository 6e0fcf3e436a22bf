"""Runs `python -m MODULE ARGUMENTS` where no package can be imported but those that are named, what they need and
Quire's own: python -m tests.bench.blocked NAMES MODULE [ARGUMENTS ...]
"""

import importlib.metadata
import re
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

from rpc.distribution import NAME


def wanted_by(names: Sequence[str]) -> set[str]:
    """These distributions, all that they need here, without extras, and Quire, but not what it needs; by normalised
    name.
    """
    found = {NAME}
    left = list(names)
    while left:
        name = normalised(left.pop())
        if name in found:
            continue
        found.add(name)
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        left += [re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in needed if "extra ==" not in one]
    return found


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class Blocked(MetaPathFinder):
    """Finds nothing that only other distributions have; what no distribution has, it leaves alone."""

    def __init__(self, allowed: set[str]) -> None:
        owners = importlib.metadata.packages_distributions()
        self._names = {
            module for module, distributions in owners.items() if not {normalised(d) for d in distributions} & allowed
        }

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    _, names, module, *arguments = sys.argv
    sys.meta_path.insert(0, Blocked(wanted_by(names.split(","))))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
