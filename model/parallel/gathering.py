"""Finds a group's followers among all connections to rank 0.

Other processes may connect too, by mistake or on purpose. So each connection has HELLO_SECONDS to show the group's
token and its hello: its rank and the facts that all ranks must agree on. All connections wait at the same time, so a
silent one delays none. From one without the token, nothing is read beyond the bytes where it should be.
"""

import hmac
import logging
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from model.errors import RankLost
from model.parallel.group import HELLO_SECONDS, START_SECONDS, TOKEN_BYTES, WORDS_SECONDS, FollowerRefused, Said
from model.parallel.sockets import tune
from model.parallel.wire import FORMAT, FRAME, MOST_WORDS, FrameKind, WireError, send, unpack_words

log = logging.getLogger("quire.ranks")

MOST_CALLERS = 64  # connections that are read at once: the next one takes the place of the oldest
LOOK_SECONDS = 0.1  # interval of the checks for ended ranks


def gather(
    listener: socket.socket, size: int, token: bytes, runs: Said, ended: Callable[[], str]
) -> list[socket.socket]:
    """Waits for the followers.

    Args:
        listener: Socket that they connect to.
        size: The number of ranks, with rank 0.
        token: The group's token.
        runs: Facts that a follower's hello must contain, as the model that it runs.
        ended: Returns why a rank will never come, "" while all may.

    Returns:
        Connections of ranks 1 and up, in their order.

    Raises:
        RankLost: A rank has ended, or did not come in time.
        FollowerRefused: A follower runs something else.
    """
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + START_SECONDS
    callers = Callers(listener, token)
    try:
        while missing := [rank for rank in range(1, size) if rank not in found]:
            if why := ended():
                raise RankLost(why)
            if time.monotonic() > deadline:
                raise RankLost(f"ranks {missing} did not come within {START_SECONDS:g} s")
            if (caller := callers.next(LOOK_SECONDS)) is not None:
                found[_rank(*caller, missing, runs)] = caller[0]
    except BaseException:
        for follower in found.values():
            follower.close()
        raise
    finally:
        callers.close()
    return [found[rank] for rank in range(1, size)]


def _rank(connection: socket.socket, said: Said, missing: Sequence[int], runs: Said) -> int:
    """Returns the rank of a follower.

    Raises:
        FollowerRefused: The follower runs something else, so no group can be formed with it.
    """
    rank: Any = said.get("rank")
    due = {"format": FORMAT, **runs}
    wrong = [f"{key} {said.get(key)}, {value} is due" for key, value in due.items() if said.get(key) != value]
    if rank not in missing:
        wrong.append(f"rank {rank}, {' or '.join(map(str, missing))} is missing")
    if not wrong:
        return int(rank)
    why = f"a follower has {'; '.join(wrong)}"
    with suppress(OSError):
        connection.settimeout(WORDS_SECONDS)
        send(connection, FrameKind.REFUSED, why.encode())
    connection.close()
    raise FollowerRefused(why)


class Callers:
    """Connections whose hello is not complete, the oldest first."""

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._listener, self._token = listener, token
        self._callers: list[HelloReader] = []
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def next(self, seconds: float) -> tuple[socket.socket, Said] | None:
        """Waits at most about `seconds` for a connection with the token and a complete hello.

        Returns:
            The connection and its hello. None where no hello is complete yet.
        """
        ready = [key.data for key, _ in self._selector.select(seconds)]
        for caller in [caller for caller in self._callers if time.monotonic() > caller.until]:
            self._send_away(caller, f"it did not say who it is within {HELLO_SECONDS:g} s")
        for caller in self._callers.copy():
            if caller in ready and (said := self._heard(caller)) is not None:
                self._forget(caller)
                return caller.connection, said
        if None in ready:
            self._accept()
        return None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it was closed before it was accepted
        tune(connection)
        connection.setblocking(False)
        if len(self._callers) == MOST_CALLERS:
            self._send_away(self._callers[0], f"{MOST_CALLERS} have come since, and it has not said who it is")
        self._callers.append(caller := HelloReader(connection, self._token))
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _heard(self, caller: "HelloReader") -> Said | None:
        try:
            return caller.hear()
        except (OSError, WireError) as error:
            self._send_away(caller, str(error))
            return None

    def _send_away(self, caller: "HelloReader", why: str) -> None:
        log.warning("a connection was refused: %s", why)
        self._forget(caller)
        caller.connection.close()

    def _forget(self, caller: "HelloReader") -> None:
        self._callers.remove(caller)
        self._selector.unregister(caller.connection)

    def close(self) -> None:
        for caller in self._callers:
            caller.connection.close()
        self._selector.close()


class HelloReader:
    """A connection whose hello is read.

    Attributes:
        until: Time by which the hello must be complete, in seconds of the monotonic clock.
    """

    def __init__(self, connection: socket.socket, token: bytes) -> None:
        self.connection, self.until = connection, time.monotonic() + HELLO_SECONDS
        self._token, self._said = token, bytearray()
        self._due = FRAME.size + TOKEN_BYTES

    def hear(self) -> Said | None:
        """Reads the bytes that have come.

        Returns:
            The hello. None while it is incomplete.

        Raises:
            WireError: The connection has ended, has no token, or sends no hello.
            OSError: The connection failed.
        """
        while len(self._said) < self._due:
            try:
                some = self.connection.recv(self._due - len(self._said))
            except BlockingIOError:
                return None
            if not some:
                raise WireError("it has hung up")
            self._said += some
            if len(self._said) == FRAME.size + TOKEN_BYTES:
                self._due = self._checked()
        said = unpack_words(self._said[FRAME.size + TOKEN_BYTES :])
        if not isinstance(said, dict):
            raise WireError("a rank does not say what it runs")
        return said

    def _checked(self) -> int:
        """Checks the token, and returns the bytes of the whole hello. Raises WireError."""
        size, kind = FRAME.unpack_from(self._said)
        right = hmac.compare_digest(self._said[FRAME.size :], self._token)
        if not right or kind != FrameKind.HELLO or not TOKEN_BYTES < size <= TOKEN_BYTES + MOST_WORDS:
            raise WireError("it comes without this group's token")
        return int(FRAME.size + size)
