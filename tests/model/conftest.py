"""Checkpoints that the tests of the model share; each is written once a session."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import write_llama
from tests.support.engines import GROUPS
from tests.support.ranks import close_all
from tests.support.threads import one_thread


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tests of what threads could change ask for `two_threads`."""
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _close_ranks() -> Iterator[None]:
    """Ends the groups of ranks that a test's rigs have opened: their threads would outlive it."""
    yield
    groups = GROUPS.copy()
    GROUPS.clear()
    close_all(groups)


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 layers, 64 wide, 4 heads over 2 KV heads, 320 ids, context 256."""
    return write_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Context 512: room for sequences of several attention blocks."""
    return write_llama(tmp_path_factory.mktemp("long"), seed=1, max_position_embeddings=512, num_hidden_layers=2)


@pytest.fixture(scope="session")
def demo() -> Path:
    """The checkpoint in the repository."""
    return Path(__file__).parents[2] / "model" / "demo" / "checkpoint"
