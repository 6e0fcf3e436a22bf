"""A lock that goes to the thread that has waited longest."""

import threading

import pytest

from model.inputs.fair_lock import FairLock
from tests.support.processes import wait_until


class Waiting:
    """Threads that wait for a lock, which this thread has."""

    def __init__(self, lock: FairLock, count: int) -> None:
        self.got = list[int]()
        self.threads = [threading.Thread(target=self._get, args=(lock, i), daemon=True) for i in range(count)]
        for i, thread in enumerate(self.threads):
            thread.start()
            wait_until(lambda i=i: lock.waiting == i + 1, "its place in the queue")  # type: ignore[misc]

    def _get(self, lock: FairLock, number: int) -> None:
        with lock:
            self.got.append(number)


def test_it_goes_to_who_has_waited_longest() -> None:
    """Also where the thread that has it asks again at once."""
    lock = FairLock()
    with lock:
        waiting = Waiting(lock, 4)
    with lock:
        assert waiting.got == [0, 1, 2, 3]
    for thread in waiting.threads:
        thread.join(60)
    assert not lock.locked()


def test_one_thread_has_it_at_a_time() -> None:
    lock, inside, most = FairLock(), list[int](), list[int]()

    def work(number: int) -> None:
        for _ in range(200):
            with lock:
                inside.append(number)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1] * 800
    assert not lock.locked()


@pytest.mark.parametrize("has_turn", [False, True])
def test_a_thread_that_leaves_takes_no_turn_with_it(monkeypatch: pytest.MonkeyPatch, has_turn: bool) -> None:
    lock, real = FairLock(), threading.Lock

    class Interrupted:
        """Interrupts the thread that waits for it, before its turn or just behind it."""

        def __init__(self) -> None:
            self._acquired = 0

        def acquire(self) -> None:
            self._acquired += 1
            if self._acquired == 2:
                if has_turn:
                    lock.__exit__(None, None, None)
                raise KeyboardInterrupt

        def release(self) -> None:
            pass

    with lock:
        monkeypatch.setattr(threading, "Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.__enter__()
        monkeypatch.setattr(threading, "Lock", real)
        if not has_turn:
            assert lock.locked()
    assert not lock.locked()
    with lock:
        pass
