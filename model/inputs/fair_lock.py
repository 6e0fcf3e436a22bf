"""A lock that threads get in the order in which they ask for it."""

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A lock for `with`, which goes to the thread that has waited longest.

    A `threading.Lock` goes to whichever thread comes first: one that releases it and asks again at once most often has
    it before a thread that waits is awake.
    """

    def __init__(self) -> None:
        self._state = threading.Lock()  # held for the lines that read or change the others
        self._held = False
        self._waiting = deque[threading.Lock]()  # each is held until its thread's turn

    def locked(self) -> bool:
        """Returns whether a thread has it."""
        return self._held

    @property
    def waiting(self) -> int:
        """Count of threads that wait for it."""
        return len(self._waiting)

    def __enter__(self) -> None:
        with self._state:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # as KeyboardInterrupt: no turn goes to a thread that has left
            with self._state:
                left = turn in self._waiting
                if left:
                    self._waiting.remove(turn)
            if not left:
                self._release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        with self._state:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False
