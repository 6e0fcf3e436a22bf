"""For all tests: threads that wait politely, and no process left behind."""

from collections.abc import Iterator

import psutil
import pytest

import model  # noqa: F401 - before torch: it says how OpenMP's threads wait


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    yield
    left = [p.cmdline() for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert left == []
