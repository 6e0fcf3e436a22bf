"""Connections of a rank group: a socket from each follower to rank 0.

A follower shows the group's token, its rank and the facts that must agree. A mismatch is refused with its reason. The
end of a rank is seen at once, on the other side of its socket.
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
from model.parallel.wire import (
    FORMAT,
    MOST_BYTES,
    MOST_WORDS,
    FrameKind,
    WireError,
    pack_words,
    receive,
    send,
    unpack_words,
)

TOKEN_BYTES = 32
WORDS_SECONDS = 0.5  # for reading a rank's last words
HELLO_SECONDS = 5.0  # for a connection's hello
START_SECONDS = 600.0  # for a rank to load its shard
CUT_OFF = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
LEADER_ENDED = "rank 0 has ended"

Said = Mapping[str, Any]


class FollowerRefused(ValueError):
    """Rank 0 refuses this follower. Says why."""


class Leader:
    """Rank 0's side of the connections."""

    def __init__(self, followers: Sequence[socket.socket], seconds: float) -> None:
        """Takes the connections over.

        Args:
            followers: Connections of ranks 1 and up.
            seconds: Timeout of a message, once all have started.
        """
        self._followers, self._seconds = list(followers), seconds
        # One lock a follower: the watch reads its last words on another thread than the one that waits for an answer.
        self._reading = [threading.Lock() for _ in followers]
        self._words: dict[int, str] = {}
        for follower in followers:
            follower.settimeout(START_SECONDS)

    @property
    def sockets(self) -> dict[int, socket.socket]:
        """Connections by rank."""
        return dict(enumerate(self._followers, 1))

    def exchange(self, said: Said) -> list[Said]:
        """Collects every rank's words and sends all to all. See `Ranks`."""
        words = [said, *(unpack_words(self._answer(rank, FrameKind.SAID, MOST_WORDS)) for rank in self.sockets)]
        self._send(FrameKind.HEARD, pack_words(words))
        return words

    def started(self) -> None:
        """Sets the timeout of messages to that of ranks at work."""
        for follower in self._followers:
            follower.settimeout(self._seconds)

    def broadcast(self, kind: FrameKind, content: bytes) -> None:
        """Sends a frame to all followers. Raises RankLost."""
        self._send(kind, content)

    def answers(self, kind: FrameKind) -> list[bytearray]:
        """Waits for a frame of each follower, in the order of ranks. Raises RankLost."""
        return [self._answer(rank, kind, MOST_BYTES) for rank in self.sockets]

    def _send(self, kind: FrameKind, content: bytes) -> None:
        for rank, follower in self.sockets.items():
            try:
                send(follower, kind, content)
            except TimeoutError:
                raise RankLost(f"rank {rank} has read nothing for {follower.gettimeout():g} s") from None
            except OSError as error:
                raise RankLost(self.last_words(rank) or f"rank {rank} is gone: {error}") from None

    def _answer(self, rank: int, kind: FrameKind, most: int) -> bytearray:
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
        if frame[0] is FrameKind.FAILED:
            raise RankLost(_failure(rank, frame[1]))
        if frame[0] is not kind:
            raise RankLost(f"rank {rank} says {frame[0].name}, {kind.name} is due")
        return frame[1]

    def last_words(self, rank: int) -> str:
        """Returns the last words of a follower that has closed its connection.

        Returns:
            "" where it has none, or another thread is reading them.
        """
        follower, reading = self._followers[rank - 1], self._reading[rank - 1]
        if not reading.acquire(timeout=WORDS_SECONDS):
            return ""
        try:
            follower.settimeout(WORDS_SECONDS)
            frame = receive(follower, MOST_WORDS)
            if frame is not None and frame[0] is FrameKind.FAILED:
                self._words[rank] = _failure(rank, frame[1])
        except (OSError, WireError):
            pass  # its last words cannot be read
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
        """Connects to rank 0 and says hello; `runs` are the facts that must agree. Raises OSError."""
        connection = connect(address, HELLO_SECONDS)
        connection.settimeout(START_SECONDS)
        send(connection, FrameKind.HELLO, token + pack_words({"format": FORMAT, "rank": rank, **runs}))
        return Follower(connection)

    def exchange(self, said: Said) -> list[Said]:
        """Sends this rank's words and receives those of all. See `Ranks`."""
        send(self.socket, FrameKind.SAID, pack_words(said))
        return list(unpack_words(self.answer(FrameKind.HEARD)))

    def answer(self, kind: FrameKind) -> bytearray:
        """Receives rank 0's answer, before the first step.

        Raises:
            FollowerRefused: Rank 0 refuses this follower.
            RankLost: Rank 0 has ended.
            WireError: The answer is of another kind.
        """
        frame = receive(self.socket, MOST_WORDS)
        if frame is None:
            raise RankLost(LEADER_ENDED)
        if frame[0] is FrameKind.REFUSED:
            raise FollowerRefused(frame[1].decode(errors="replace"))
        if frame[0] is not kind:
            raise WireError(f"rank 0 says {frame[0].name}, {kind.name} is due")
        return frame[1]

    def next(self) -> tuple[FrameKind, bytearray] | None:
        """Waits for work. None once rank 0 has ended."""
        self.socket.settimeout(None)
        with suppress(ConnectionError):
            return receive(self.socket)
        return None

    def reply(self, kind: FrameKind, content: bytes) -> None:
        send(self.socket, kind, content)

    def failed(self, why: str) -> None:
        """Sends why this rank ends, as its last words."""
        with suppress(OSError):
            send(self.socket, FrameKind.FAILED, why.encode()[:MOST_WORDS])

    def close(self) -> None:
        self.socket.close()


def _failure(rank: int, words: bytearray) -> str:
    return f"rank {rank} has failed: {words.decode(errors='replace')}"


class RankWatch:
    """A thread that notices lost ranks.

    A rank whose connection closes is lost at once. One without a sign of life is lost after a timeout. Silence is
    counted in turns of this thread, so that a machine that slept does not take the others for dead.
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
        """Starts the thread.

        Args:
            sockets: Connections by rank.
            lost: Called once with the reason.
            seconds: Silence after which a rank is lost.
            lives: Returns signs of life by rank, as `Collective.lives`.
            last_words: Returns the last words of a rank whose connection has closed.
        """
        self._sockets, self._lost, self._seconds, self._lives = dict(sockets), lost, seconds, lives
        self._last_words = last_words
        self._hears = False
        self._silent: dict[int, tuple[int, int]] = {}  # by rank: last sign, turns since
        self._ended, self._end = socket.socketpair()
        self._lives()  # a first sign now, so that a rank that stops before its first turn is noticed too
        self._thread = threading.Thread(target=self._run, name="quire-ranks", daemon=True)
        self._thread.start()

    def hear(self) -> None:
        """Starts to count silence. Before, ranks load models or compile, and may be silent for long."""
        self._hears = True

    def close(self) -> None:
        """Stops the thread; no rank is reported any more."""
        self._end.close()
        # `lost` may close the group on this thread, which cannot wait for itself.
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
