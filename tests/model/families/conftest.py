"""Computes once a session for each case: its checkpoint, the results of transformers, those of Quire."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import transformers

from tests.model.families import checkpoints, parity, reference
from tests.model.families.cases import Case
from tests.model.families.prompts import PROMPTS

T = TypeVar("T")


class Shelf:
    """Made when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[tuple[str, str], object] = {}

    def _once(self, what: str, case: Case, make: Callable[[], T]) -> T:
        key = (what, case.name)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]

    def checkpoint(self, case: Case) -> Path:
        return self._once("checkpoint", case, lambda: checkpoints.write(case, self._root / case.name))

    def reference(self, case: Case) -> reference.Reference:
        return self._once("reference", case, lambda: reference.read(self.checkpoint(case), PROMPTS, padded=case.padded))

    def answer(self, case: Case) -> parity.Answer:
        return self._once("answer", case, lambda: parity.ask(self.checkpoint(case)))


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    transformers.utils.logging.disable_progress_bar()
    return Shelf(tmp_path_factory.mktemp("families"))
