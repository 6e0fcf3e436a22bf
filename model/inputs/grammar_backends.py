"""The libraries that keep structured output, by name, and which of them a grammar is for."""

from importlib.util import find_spec

LLGUIDANCE, XGRAMMAR = "llguidance", "xgrammar"
BACKENDS = (LLGUIDANCE, XGRAMMAR)
MARK = "%xgrammar\n"
"""First line of a grammar that XGrammar compiles. No grammar of llguidance has it."""
EXTRA = "pip install 'xgrammar>=0.2.8,<0.3', or make setup EXTRAS=xgrammar"
"""How XGrammar is installed."""
DEPENDENCY = "pip install 'llguidance>=1.9,<2': Quire depends on it, so this installation is not complete"
"""How llguidance is installed."""


class BackendMissing(ValueError):
    """A library of structured output is not installed. Says which."""


def check_backend(name: str) -> None:
    """Checks that a library is installed, without its import; llguidance too, which checks constraints for both.

    Raises:
        BackendMissing: One is not.
        ValueError: There is none of this name.
    """
    if name not in BACKENDS:
        raise ValueError(f"{name!r} is no library of structured output, must be one of {', '.join(BACKENDS)}")
    for package, how in ((LLGUIDANCE, DEPENDENCY), (XGRAMMAR, EXTRA)):
        if package in (LLGUIDANCE, name) and find_spec(package) is None:
            raise BackendMissing(f"structured output by {name} needs the package {package}: {how}")


def is_for_xgrammar(grammar: str) -> bool:
    """Returns whether XGrammar compiles a grammar, and not llguidance."""
    return grammar.startswith(MARK)
