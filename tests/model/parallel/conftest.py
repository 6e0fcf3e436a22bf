"""Checkpoints of all architectures, written once a session."""

import pytest
import transformers

from tests.model.families.conftest import Shelf
from tests.model.vision.conftest import Shelf as SeeingShelf


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    transformers.utils.logging.disable_progress_bar()
    return Shelf(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> SeeingShelf:
    return SeeingShelf(tmp_path_factory.mktemp("vision"))
