"""For all tests: threads that wait politely, and no process left behind."""

import asyncio
import gc
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

import model  # noqa: F401 - before torch: it says how OpenMP's threads wait
from tests.support.event_loop import TestLoopPolicy
from tests.support.examples import QUICK
from tests.support.forking import FORKS
from tests.support.marks import beyond_part, mark_beyond_samples

settings.load_profile(QUICK)
asyncio.set_event_loop_policy(TestLoopPolicy())

# A suite that is started in the background ignores Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keeps the garbage collector off what lives as long as the session.

    Collection makes some 800,000 objects and drops few: a quarter of its time went to looking at them again and again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # a full collection in a test looks at what tests made alone
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks cases that samples leave out, and leaves out those of other parts.

    Tests that run folders of tests come first, then those with servers: they take longest, and the end is short.
    """
    mark_beyond_samples(items)
    if others := beyond_part(items):
        config.hook.pytest_deselected(items=others)
        left = {*others}
        items[:] = [item for item in items if item not in left]
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    if item.get_closest_marker("every_part") is not None:
        return 0
    return 1 if {"e2e", "chaos"} & {*item.path.parts} else 2


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Names the back end of tests that are coroutines; each gets an event loop of its own."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def base_of_tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes pytest's base directory before any test moves TMPDIR: pytest makes it at the first `tmp_path`."""
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    yield
    FORKS.close()
    left = [p.cmdline() for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert left == []
