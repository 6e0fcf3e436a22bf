"""Runs `quire` in a process that a fork server forked, as its console script does in a new interpreter."""

import sys
from types import ModuleType


def main() -> None:
    from quire.__main__ import main as run

    sys.modules["__main__"] = ModuleType("__main__")  # where the command line's library looks for the program's name
    run()
