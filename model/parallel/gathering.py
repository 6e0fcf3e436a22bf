"""How rank 0 finds its followers among all who connect.

Others may, by mistake or not. So each has so long to show the group's token and to say which rank it is and what it
runs, and all have that time together: who says little or nothing holds nobody up. Of who does not show the token
nothing is read beyond the bytes where it should be.
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
from model.parallel.group import HELLO_SECONDS, START_SECONDS, TOKEN_BYTES, WORDS_SECONDS, Refused, Said
from model.parallel.sockets import tune
from model.parallel.wire import FORMAT, FRAME, MOST_WORDS, Kind, WireError, send, unpack_words

log = logging.getLogger("quire.ranks")

MOST_CALLERS = 64  # that are listened to at once: the next one takes the place of the first
LOOK_SECONDS = 0.1  # between two looks whether a rank will never come


def gather(
    listener: socket.socket, size: int, token: bytes, runs: Said, ended: Callable[[], str]
) -> list[socket.socket]:
    """Connections of all ranks but 0, in their order. runs: what a follower must say that it runs, too. ended: why one
    will never come, "" while all may. Raises RankLost, Refused.
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
    """Which one it is. Raises Refused for a follower that runs something else, with which there will be no group."""
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
        send(connection, Kind.REFUSED, why.encode())
    connection.close()
    raise Refused(why)


class Callers:
    """Those who have connected and not yet said who they are, the first to come first."""

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._listener, self._token = listener, token
        self._callers: list[Caller] = []
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def next(self, seconds: float) -> tuple[socket.socket, Said] | None:
        """One who has the token and what it says of itself; None where nobody has said all within about so long."""
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
            return  # it has gone again
        tune(connection)
        connection.setblocking(False)
        if len(self._callers) == MOST_CALLERS:
            self._send_away(self._callers[0], f"{MOST_CALLERS} have come since, and it has not said who it is")
        self._callers.append(caller := Caller(connection, self._token))
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _heard(self, caller: "Caller") -> Said | None:
        try:
            return caller.hear()
        except (OSError, WireError) as error:
            self._send_away(caller, str(error))
            return None

    def _send_away(self, caller: "Caller", why: str) -> None:
        log.warning("a connection was refused: %s", why)
        self._forget(caller)
        caller.connection.close()

    def _forget(self, caller: "Caller") -> None:
        self._callers.remove(caller)
        self._selector.unregister(caller.connection)

    def close(self) -> None:
        for caller in self._callers:
            caller.connection.close()
        self._selector.close()


class Caller:
    """One who has connected. until: when it must have said all, on the monotonic clock."""

    def __init__(self, connection: socket.socket, token: bytes) -> None:
        self.connection, self.until = connection, time.monotonic() + HELLO_SECONDS
        self._token, self._said = token, bytearray()
        self._due = FRAME.size + TOKEN_BYTES

    def hear(self) -> Said | None:
        """Reads what has come. What it says of itself, None while that is not all. Raises WireError, OSError."""
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
        """Of how many bytes its whole hello is. Raises WireError."""
        size, kind = FRAME.unpack_from(self._said)
        right = hmac.compare_digest(self._said[FRAME.size :], self._token)
        if not right or kind != Kind.HELLO or not TOKEN_BYTES < size <= TOKEN_BYTES + MOST_WORDS:
            raise WireError("it comes without this group's token")
        return int(FRAME.size + size)
