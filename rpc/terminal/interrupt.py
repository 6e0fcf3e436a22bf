"""Ctrl-C while the messages of a request are read."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rpc.client import CancelledError
from rpc.client.client import Stream


@contextmanager
def cancelled_by_ctrl_c(stream: Stream) -> Iterator[None]:
    """Cancels a stream at SIGINT. Enter it in the main thread, before the stream.

    Without it Python raises KeyboardInterrupt wherever its main thread is, also within gRPC while that takes or
    releases a lock: the lock is then held for ever, or the release fails.

    Args:
        stream: The stream that is read in this context.

    Raises:
        KeyboardInterrupt: There was a SIGINT. Raised at the end of the context, where no lock is held.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # a shell's background job ignores it
        yield
        return
    interrupted = False

    def cancel(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python's arguments
        nonlocal interrupted
        interrupted = True
        # In a thread of its own, since this one may hold a lock that `cancel` waits for.
        threading.Thread(target=stream.cancel).start()

    signal.signal(signal.SIGINT, cancel)
    try:
        yield
    except CancelledError:
        if not interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt
