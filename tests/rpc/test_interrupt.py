"""Ctrl-C stops a stream that is read, wherever the reader is, and leaves its locks as they were."""

import signal
import threading
from collections.abc import Iterator

import grpc
import pytest

from rpc.client import CancelledError
from rpc.client.failures import Failure
from rpc.terminal.interrupt import cancelled_by_ctrl_c

CANCELLED = Failure(grpc.StatusCode.CANCELLED, "")


class LockedStream:
    """A stream that takes a lock to read and to cancel, as gRPC's do. at: message at which there is a SIGINT."""

    def __init__(self, at: int | None) -> None:
        self._at, self.lock, self.cancelled = at, threading.Lock(), threading.Event()

    def __iter__(self) -> Iterator[int]:
        for number in range(5):
            with self.lock:
                if number == self._at:
                    signal.raise_signal(signal.SIGINT)
            if number == self._at:
                assert self.cancelled.wait(30)
                raise CancelledError(CANCELLED, "")
            yield number

    def cancel(self) -> None:
        with self.lock:
            self.cancelled.set()


@pytest.mark.parametrize("at", [0, 3])
def test_ctrl_c_cancels_and_is_told_at_the_end(at: int) -> None:
    stream, read = LockedStream(at), []
    with pytest.raises(KeyboardInterrupt), cancelled_by_ctrl_c(stream):  # type: ignore[arg-type]
        read.extend(iter(stream))
    assert read == list(range(at))
    assert not stream.lock.locked()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_it_nothing_is_changed() -> None:
    with cancelled_by_ctrl_c(stream := LockedStream(None)):  # type: ignore[arg-type]
        assert list(stream) == list(range(5))
    with pytest.raises(CancelledError), cancelled_by_ctrl_c(stream):  # type: ignore[arg-type]
        raise CancelledError(CANCELLED, "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_it_is_ignored_it_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with cancelled_by_ctrl_c(stream := LockedStream(None)):  # type: ignore[arg-type]
            signal.raise_signal(signal.SIGINT)
            assert list(stream) == list(range(5))
        assert not stream.cancelled.is_set()
    finally:
        signal.signal(signal.SIGINT, before)
