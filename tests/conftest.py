"""For all tests: threads that wait politely, and no process left behind."""

from collections.abc import Iterator

import psutil
import pytest

import model  # noqa: F401 - before torch: it says how OpenMP's threads wait


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: what is left at the end is short, and no worker waits long for another."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    yield
    left = [p.cmdline() for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert left == []
