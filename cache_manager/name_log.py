"""What happens to names of pages, for those outside who route by them."""

from collections.abc import Iterable

from cache_manager.page_names import Name


class NameLog:
    """Names that were given and taken since somebody last looked."""

    def __init__(self) -> None:
        self._there: dict[Name, bool] = {}

    def given(self, names: Iterable[Name]) -> None:
        self._there.update(dict.fromkeys(names, True))

    def taken(self, names: Iterable[Name]) -> None:
        self._there.update(dict.fromkeys(names, False))

    def take(self) -> tuple[list[Name], list[Name]]:
        """Those that are gone, and those that are there now; of a name that was both, what came last."""
        there, self._there = self._there, {}
        return [name for name, here in there.items() if not here], [name for name, here in there.items() if here]
