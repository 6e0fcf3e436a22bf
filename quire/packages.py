"""Checks that Quire's top-level packages are the ones that Python finds.

Their names are common ones. A `model.py` beside a user's script comes before Quire's `model` on Python's path.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = {"cache_manager": "allocator.py", "scheduler": "slices.py", "model": "kv_pool.py", "rpc": "private_files.py"}
"""Package to one of its files, which distinguishes it from another package of the same name."""


def check_packages(*names: str) -> None:
    """Checks that Python finds Quire's packages under these names.

    Raises:
        ImportError: Another module hides a package; the message names its file.
    """
    for name in names:
        place = _place_of(name)
        # A package that is not found at all is left to its import, whose error is clearer.
        if place is not None and not (place / PACKAGES[name]).is_file():
            raise ImportError(
                f"{place} hides Quire's package {name!r}: Python looks there first. Rename it, move the script "
                "elsewhere, or, if the script does not import it, run `python -P`, which does not look beside scripts",
                name=name,
                path=str(place),
            )


def _place_of(name: str) -> Path | None:
    """Returns a package's folder or a module's file; None if Python finds neither."""
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__spec__ is None:  # made by hand
        return Path(getattr(loaded, "__file__", None) or name)
    spec = find_spec(name)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0] if folders else spec.origin or name)
