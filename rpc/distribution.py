"""Quire as pip knows it: its distribution, its version, its extras."""

from importlib.metadata import version

NAME = "quire-serving"  # on PyPI `quire` is another project


def own_version() -> str:
    """Returns the version of the Quire that runs."""
    return version(NAME)


def how_to_install(extra: str) -> str:
    """Returns the instruction that installs the packages of an extra."""
    return f"in Quire's checkout `make setup EXTRAS={extra}` installs it"
