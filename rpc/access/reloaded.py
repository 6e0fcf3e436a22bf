"""Files that may change while a server runs: checked when they are needed, at most once a second."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

PERIOD = 1.0  # seconds between two checks

log = logging.getLogger("quire.access")


class Reloaded(Generic[T]):
    """A value that is read from files, and read again when one of them has changed.

    A read that fails is logged, and the last value stays in force: files that belong together are replaced one after
    the other. `current` may be called on any thread.

    Args:
        paths: Files whose change is watched.
        read: Reads the value.
        clock: Returns seconds.

    Attributes:
        value: The last value.

    Raises:
        Exception: Any exception of the first `read`.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T], clock: Callable[[], float] = time.monotonic):
        self._paths, self._read, self._clock = paths, read, clock
        self._lock = threading.Lock()
        self._seen, self.value = self._state(), read()
        self._due = clock() + PERIOD

    def current(self) -> T:
        """Returns the value, read again if the files have changed by the last check."""
        with self._lock:
            if self._clock() >= self._due:
                self._due = self._clock() + PERIOD
                self._look()
            return self.value

    def _look(self) -> None:
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            self.value = self._read()
        except (ValueError, OSError) as error:
            log.error("%s; what was read before stays in force", error)
        else:
            log.info("read anew: %s", ", ".join(map(str, self._paths)))

    def _state(self) -> list[tuple[int, ...]]:
        """Returns the state of each file behind its links: a mounted secret is a link whose target changes."""
        found = list[tuple[int, ...]]()
        for path in self._paths:
            try:
                stat = os.stat(path)
                found.append((stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size))
            except OSError:
                found.append(())
        return found
