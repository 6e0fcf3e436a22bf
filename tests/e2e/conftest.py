"""For tests with servers: models of their own processes have one thread, as those of forked servers."""

from collections.abc import Iterator

import pytest

from tests.support.threads import one_thread


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield
