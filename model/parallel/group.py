"""How the ranks of a group stay together: a socket from each follower to rank 0.

Who connects shows the group's token, says which rank it is and what it runs; what does not fit is refused with the
reason. Then whoever ends is missed at once: the other side of its socket sees it.
"""

import errno
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from model.errors import RankLost
from model.parallel.sockets import connect
from model.parallel.wire import FORMAT, MOST_BYTES, MOST_WORDS, Kind, WireError, pack_words, receive, send, unpack_words

TOKEN_BYTES = 32
WORDS_SECONDS = 0.5  # that last words may take
HELLO_SECONDS = 5.0  # that a connection may take to say who it is
START_SECONDS = 600.0  # that a rank may take to load its part
CUT_OFF = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
LEADER_ENDED = "rank 0 has ended"

Said = Mapping[str, Any]


class Refused(ValueError):
    """This rank is not wanted; says why."""


class Leader:
    """Rank 0's side of the group. followers: connections of ranks 1 and up. seconds: that one may take over a message
    once all have started.
    """

    def __init__(self, followers: Sequence[socket.socket], seconds: float) -> None:
        self._followers, self._seconds = list(followers), seconds
        # The thread that watches reads last words where no other thread is reading.
        self._reading = [threading.Lock() for _ in followers]
        self._words: dict[int, str] = {}
        for follower in followers:
            follower.settimeout(START_SECONDS)

    @property
    def sockets(self) -> dict[int, socket.socket]:
        """By rank."""
        return dict(enumerate(self._followers, 1))

    def exchange(self, said: Said) -> list[Said]:
        """See `Ranks`."""
        words = [said, *(unpack_words(self._answer(rank, Kind.SAID, MOST_WORDS)) for rank in self.sockets)]
        self._send(Kind.HEARD, pack_words(words))
        return words

    def started(self) -> None:
        """From now on nobody may take long."""
        for follower in self._followers:
            follower.settimeout(self._seconds)

    def tell(self, kind: Kind, content: bytes) -> None:
        """All followers. Raises RankLost."""
        self._send(kind, content)

    def answers(self, kind: Kind) -> list[bytearray]:
        """What each follower replies. Raises RankLost."""
        return [self._answer(rank, kind, MOST_BYTES) for rank in self.sockets]

    def _send(self, kind: Kind, content: bytes) -> None:
        for rank, follower in self.sockets.items():
            try:
                send(follower, kind, content)
            except TimeoutError:
                raise RankLost(f"rank {rank} has read nothing for {follower.gettimeout():g} s") from None
            except OSError as error:
                raise RankLost(self.last_words(rank) or f"rank {rank} is gone: {error}") from None

    def _answer(self, rank: int, kind: Kind, most: int) -> bytearray:
        follower = self._followers[rank - 1]
        try:
            with self._reading[rank - 1]:
                frame = receive(follower, most)
        except TimeoutError:
            raise RankLost(f"rank {rank} has said nothing for {follower.gettimeout():g} s") from None
        except (OSError, WireError) as error:
            raise RankLost(self._words.get(rank) or f"rank {rank} is gone: {error}") from None
        if frame is None:
            raise RankLost(self._words.get(rank) or f"rank {rank} has ended")
        if frame[0] is Kind.FAILED:
            raise RankLost(_failure(rank, frame[1]))
        if frame[0] is not kind:
            raise RankLost(f"rank {rank} says {frame[0].name}, {kind.name} is due")
        return frame[1]

    def last_words(self, rank: int) -> str:
        """Of a follower that has closed its connection, "" where it has none, or another thread is reading them."""
        follower, reading = self._followers[rank - 1], self._reading[rank - 1]
        if not reading.acquire(timeout=WORDS_SECONDS):
            return ""
        try:
            follower.settimeout(WORDS_SECONDS)
            frame = receive(follower, MOST_WORDS)
            if frame is not None and frame[0] is Kind.FAILED:
                self._words[rank] = _failure(rank, frame[1])
        except (OSError, WireError):
            pass  # what it had to say cannot be read: there are no words
        finally:
            reading.release()
        return self._words.get(rank, "")

    def close(self) -> None:
        for follower in self._followers:
            with suppress(OSError):
                follower.shutdown(socket.SHUT_RDWR)
            follower.close()


class Follower:
    """A follower's side of the group."""

    def __init__(self, leader: socket.socket) -> None:
        self.socket = leader

    @staticmethod
    def join(address: str, rank: int, token: bytes, runs: Said) -> "Follower":
        """runs: what it says that it runs. Raises OSError."""
        connection = connect(address, HELLO_SECONDS)
        connection.settimeout(START_SECONDS)
        send(connection, Kind.HELLO, token + pack_words({"format": FORMAT, "rank": rank, **runs}))
        return Follower(connection)

    def exchange(self, said: Said) -> list[Said]:
        """See `Ranks`."""
        send(self.socket, Kind.SAID, pack_words(said))
        return list(unpack_words(self.answer(Kind.HEARD)))

    def answer(self, kind: Kind) -> bytearray:
        """Of rank 0, before the first step. Raises Refused, RankLost."""
        frame = receive(self.socket, MOST_WORDS)
        if frame is None:
            raise RankLost(LEADER_ENDED)
        if frame[0] is Kind.REFUSED:
            raise Refused(frame[1].decode(errors="replace"))
        if frame[0] is not kind:
            raise WireError(f"rank 0 says {frame[0].name}, {kind.name} is due")
        return frame[1]

    def next(self) -> tuple[Kind, bytearray] | None:
        """Work, None where there will be no more."""
        self.socket.settimeout(None)
        with suppress(ConnectionError):
            return receive(self.socket)
        return None

    def reply(self, kind: Kind, content: bytes) -> None:
        send(self.socket, kind, content)

    def failed(self, why: str) -> None:
        """Last words."""
        with suppress(OSError):
            send(self.socket, Kind.FAILED, why.encode()[:MOST_WORDS])

    def close(self) -> None:
        self.socket.close()


def _failure(rank: int, words: bytearray) -> str:
    return f"rank {rank} has failed: {words.decode(errors='replace')}"


class Watch:
    """A thread that misses ranks: those whose connection closes, at once; those that show no sign of life for so many
    seconds. lives: see `Collective`. lost: is told once. last_words: of a rank whose connection has closed.

    Silence is counted in its own turns, so that a machine that slept does not take the others for dead.
    """

    TURN = 0.25  # seconds

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        lost: Callable[[str], None],
        seconds: float,
        lives: Callable[[], Sequence[int]],
        last_words: Callable[[int], str],
    ) -> None:
        self._sockets, self._lost, self._seconds, self._lives = dict(sockets), lost, seconds, lives
        self._last_words = last_words
        self._hears = False
        self._silent: dict[int, tuple[int, int]] = {}  # by rank: last sign, turns since
        self._ended, self._end = socket.socketpair()
        self._lives()  # a first sign now: who stops before its first turn is missed too
        self._thread = threading.Thread(target=self._run, name="quire-ranks", daemon=True)
        self._thread.start()

    def hear(self) -> None:
        """From now on silence counts: whoever loads a model or compiles may be silent for long."""
        self._hears = True

    def close(self) -> None:
        """Nobody is missed any more."""
        self._end.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._ended.close()

    def _run(self) -> None:
        poll = select.poll()
        ranks = {connection.fileno(): rank for rank, connection in self._sockets.items()}
        for descriptor in (*ranks, self._ended.fileno()):
            poll.register(descriptor, select.POLLRDHUP)
        while True:
            seen = [descriptor for descriptor, _ in poll.poll(self.TURN * 1000)]
            if self._ended.fileno() in seen:
                return
            why = self._gone(ranks[seen[0]]) if seen else self._quiet()
            if why:
                self._lost(why)
                return

    def _gone(self, rank: int) -> str:
        error = self._sockets[rank].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error in CUT_OFF:
            return f"rank {rank} cannot be reached: {os.strerror(error)}"
        if rank == 0:
            return LEADER_ENDED
        return self._last_words(rank) or f"rank {rank} has ended"

    def _quiet(self) -> str:
        for rank, sign in enumerate(self._lives()):
            last, turns = self._silent.get(rank, (sign, 0))
            self._silent[rank] = sign, turns + 1 if sign == last and self._hears else 0
            if self._hears and sign and turns * self.TURN > self._seconds:
                return f"rank {rank} has shown no sign of life for {self._seconds:g} s: it was stopped, or hangs"
        return ""
