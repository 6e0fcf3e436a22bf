"""Files that may change while a server runs: looked at when they are needed, at most once a second."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

PERIOD = 1.0  # seconds between two looks

log = logging.getLogger("quire.access")


class Reloaded(Generic[T]):
    """What `read` makes of these files, made anew when one of them has changed. Where that fails, what there was stays
    in force and the log says why: files are replaced one after the other. May be asked on any thread.

    Raises what `read` does, the first time.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T], clock: Callable[[], float] = time.monotonic):
        self._paths, self._read, self._clock = paths, read, clock
        self._lock = threading.Lock()
        self._seen, self.value = self._state(), read()
        self._due = clock() + PERIOD

    def current(self) -> T:
        """As of the last look."""
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
        """Behind links: a mounted secret is a link that is changed to another directory."""
        found = list[tuple[int, ...]]()
        for path in self._paths:
            try:
                stat = os.stat(path)
                found.append((stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size))
            except OSError:
                found.append(())
        return found
