"""Every test here ends the groups that its rigs have opened."""

from collections.abc import Iterator

import pytest
import transformers

from tests.model.families.conftest import Shelf
from tests.model.vision.conftest import Shelf as SeeingShelf
from tests.support.engines import GROUPS
from tests.support.ranks import close_all


@pytest.fixture(autouse=True)
def _close_ranks() -> Iterator[None]:
    yield
    groups = GROUPS.copy()
    GROUPS.clear()
    close_all(groups)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    transformers.utils.logging.disable_progress_bar()
    return Shelf(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> SeeingShelf:
    return SeeingShelf(tmp_path_factory.mktemp("vision"))
