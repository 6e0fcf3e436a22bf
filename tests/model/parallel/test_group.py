"""Ranks find each other. A stranger is refused with the reason and delays no rank; a rank that is gone is reported."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from model.errors import RankLost
from model.parallel import gathering
from model.parallel.gathering import gather
from model.parallel.group import Follower, FollowerRefused, Leader, RankWatch
from model.parallel.sockets import LOCAL, address_of, connect, listen, new_local
from model.parallel.wire import FRAME, FrameKind, pack_words, receive, send
from tests.support.ranks import needs_ipv6

TOKEN, OTHER = b"a" * 32, b"b" * 32
RUNS = {"size": 3, "checkpoint": "c"}


class Meeting:
    """Rank 0 waits for ranks 1 and 2 at an address of this kind."""

    def __init__(self, address: str, ended: Callable[[], str] = str) -> None:
        listener = listen(address)
        self.address = address_of(listener)
        self._pool, self._over = ThreadPoolExecutor(1), threading.Event()
        whether = lambda: ended() or "the test is over" * self._over.is_set()  # noqa: E731
        self.leader: Future[Leader] = self._pool.submit(self._lead, listener, whether)
        self.followers: list[Follower] = []

    def _lead(self, listener: socket.socket, ended: Callable[[], str]) -> Leader:
        with listener:
            return Leader(gather(listener, RUNS["size"], TOKEN, RUNS, ended), 0.3)

    def join(self, rank: int, token: bytes = TOKEN, runs: Mapping[str, Any] = RUNS) -> Follower:
        self.followers.append(Follower.join(self.address, rank, token, runs))
        return self.followers[-1]

    def close(self) -> None:
        for follower in self.followers:
            follower.close()
        self._over.set()
        self._pool.shutdown()
        if self.leader.exception() is None:
            self.leader.result().close()


@pytest.fixture(params=["local", "127.0.0.1:0", pytest.param("[::1]:0", marks=needs_ipv6)])
def meeting(request: pytest.FixtureRequest) -> Iterator[Meeting]:
    made = Meeting(new_local() if request.param == "local" else request.param)
    yield made
    made.close()


def test_all_are_told_what_each_has_said(meeting: Meeting) -> None:
    two, one = meeting.join(2), meeting.join(1)
    leader = meeting.leader.result(5)
    with ThreadPoolExecutor(3) as pool:
        heard = list(pool.map(lambda pair: pair[1].exchange({"rank": pair[0]}), enumerate([leader, one, two])))
    assert heard == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_steps_over_tcp_do_not_wait_for_answers(meeting: Meeting) -> None:
    one, two = meeting.join(1), meeting.join(2)
    both_sides = [one.socket, two.socket, *meeting.leader.result(5).sockets.values()]
    for side in both_sides:
        if side.family != socket.AF_UNIX:
            assert side.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert side.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_who_has_another_token_is_sent_away_and_the_others_meet(
    meeting: Meeting, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        wrong = meeting.join(1, OTHER)
        with pytest.raises((RankLost, ConnectionError)):
            wrong.answer(FrameKind.WELCOME)
        silent = connect(meeting.address, 1.0)
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
        silent.close()
        meeting.join(1)
        meeting.join(2)
        assert list(meeting.leader.result(10).sockets) == [1, 2]
    assert "without this group's token" in caplog.text


def test_a_local_name_is_no_file_and_ends_with_its_socket() -> None:
    with listen(new_local()) as listener:
        address = address_of(listener)
        assert address.startswith(LOCAL)
        connect(address, 1.0).close()
    with pytest.raises(ConnectionRefusedError):
        connect(address, 1.0)


def test_who_says_nothing_holds_nobody_up(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than are listened to at once."""
    monkeypatch.setattr(gathering, "HELLO_SECONDS", 3600.0)
    silent = [connect(meeting.address, 1.0) for _ in range(gathering.MOST_CALLERS + 3)]
    meeting.join(1)
    meeting.join(2)
    assert list(meeting.leader.result(60).sockets) == [1, 2]
    for stranger in silent:
        stranger.settimeout(60)
        assert stranger.recv(1) == b"", "it is sent away too"
        stranger.close()


def test_who_says_little_by_little_has_one_deadline(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it has the token."""
    monkeypatch.setattr(gathering, "HELLO_SECONDS", 0.4)
    slow = connect(meeting.address, 1.0)
    hello = FRAME.pack(len(TOKEN) + 1000, FrameKind.HELLO) + TOKEN + b" " * 1000
    with pytest.raises(OSError):  # noqa: PT011 - whichever it is of a connection that is closed
        send_slowly(slow, hello[:1000])
    slow.close()
    meeting.join(1)
    meeting.join(2)
    meeting.leader.result(5)


def send_slowly(to: socket.socket, content: bytes) -> None:
    for byte in content:
        to.sendall(bytes([byte]))
        time.sleep(0.02)


@pytest.mark.parametrize(
    "said",
    [
        FRAME.pack(2**31, FrameKind.HELLO) + OTHER,
        FRAME.pack(2**31, FrameKind.HELLO) + TOKEN,
        FRAME.pack(len(TOKEN), FrameKind.HELLO) + TOKEN,
        FRAME.pack(100, FrameKind.STEP) + TOKEN,
    ],
)
def test_of_who_has_no_token_no_more_is_read_or_held(meeting: Meeting, said: bytes) -> None:
    """Nor of who says that it is to say more than any rank does."""
    stranger = connect(meeting.address, 1.0)
    stranger.sendall(said)
    stranger.settimeout(2)
    assert stranger.recv(1) == b"", "it is sent away before it has said the rest"
    stranger.close()
    meeting.join(1)
    meeting.join(2)
    meeting.leader.result(5)


@pytest.mark.parametrize(
    ("rank", "runs", "why"),
    [
        (1, {"checkpoint": "d"}, "checkpoint d, c is due"),
        (1, {"size": 2}, "size 2, 3 is due"),
        (1, {"format": 0}, "format 0, 4 is due"),
        (3, {}, "rank 3, 1 or 2 is missing"),
        (0, {}, "rank 0, 1 or 2 is missing"),
    ],
)
def test_who_runs_something_else_is_refused_on_both_sides(
    meeting: Meeting, rank: int, runs: Mapping[str, Any], why: str
) -> None:
    follower = meeting.join(rank, runs={**RUNS, **runs})
    with pytest.raises(FollowerRefused, match=why):
        follower.answer(FrameKind.WELCOME)
    with pytest.raises(FollowerRefused, match=why):
        meeting.leader.result(5)


def test_a_rank_that_will_never_come_is_not_waited_for() -> None:
    meeting = Meeting(new_local(), lambda: "the process of rank 2 ended with code 1 before it was ready")
    with pytest.raises(RankLost, match="rank 2 ended with code 1"):
        meeting.leader.result(5)


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "START_SECONDS", 0.3)
    meeting = Meeting(new_local())
    meeting.join(1)
    with pytest.raises(RankLost, match=r"ranks \[2\] did not come within 0.3 s"):
        meeting.leader.result(5)
    meeting.close()


def both(meeting: Meeting) -> tuple[Leader, Follower, Follower]:
    one, two = meeting.join(1), meeting.join(2)
    leader = meeting.leader.result(5)
    leader.started()
    return leader, one, two


def test_last_words_are_heard(meeting: Meeting) -> None:
    leader, one, two = both(meeting)
    two.reply(FrameKind.LOST, b"")
    one.failed("RuntimeError: out of something")
    with pytest.raises(RankLost, match="rank 1 has failed: RuntimeError: out of something"):
        leader.answers(FrameKind.LOST)


def test_who_says_nothing_is_named(meeting: Meeting) -> None:
    leader, one, _ = both(meeting)
    one.reply(FrameKind.LOST, b"")
    with pytest.raises(RankLost, match=r"rank 2 has said nothing for 0.3 s"):
        leader.answers(FrameKind.LOST)


def test_who_reads_nothing_is_named(meeting: Meeting) -> None:
    leader, _, _ = both(meeting)
    with pytest.raises(RankLost, match=r"rank 1 has read nothing for 0.3 s"):
        leader.broadcast(FrameKind.STEP, bytes(2**24))


def test_the_end_of_rank_0_is_the_end_of_the_work(meeting: Meeting) -> None:
    leader, one, _ = both(meeting)
    leader.broadcast(FrameKind.COPY, b"1")
    leader.close()
    assert one.next() == (FrameKind.COPY, bytearray(b"1"))
    assert one.next() is None


def lost_by(
    sockets: Mapping[int, socket.socket], lives: Callable[[], list[int]], seconds: float
) -> tuple[RankWatch, Future[str]]:
    lost: Future[str] = Future()
    leader = Leader(list(sockets.values()), 1.0)
    return RankWatch(sockets, lost.set_result, seconds, lives, leader.last_words), lost


@pytest.mark.parametrize("words", ["", "a reason"])
def test_a_closed_connection_is_seen_at_once(words: str) -> None:
    mine, other = socket.socketpair()
    watch, lost = lost_by({1: mine}, list, 3600.0)
    if words:
        send(other, FrameKind.FAILED, words.encode())
    other.close()
    assert lost.result(60) == (f"rank 1 has failed: {words}" if words else "rank 1 has ended")
    watch.close()


def test_words_that_one_thread_has_read_are_told_by_both() -> None:
    """Rank 0 waits for an answer while its other thread watches the same connection."""
    for _ in range(30):
        mine, other = socket.socketpair()
        leader, lost = Leader([mine], 1.0), Future[str]()
        watch = RankWatch({1: mine}, lost.set_result, 10.0, list, leader.last_words)
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(leader.answers, FrameKind.LOST)
            send(other, FrameKind.FAILED, b"a reason")
            other.close()
            with pytest.raises(RankLost, match="rank 1 has failed: a reason"):
                answers.result(5)
        watch.close()
        leader.close()


def test_silence_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's silence counts once it has been heard and all have loaded, not while it has not begun."""
    monkeypatch.setattr(RankWatch, "TURN", 0.02)
    signs = [1, 1, 0]
    stop = threading.Event()

    def live() -> None:
        while not stop.wait(0.005):
            signs[0] += 1

    thread = threading.Thread(target=live)
    thread.start()
    watch, lost = lost_by({}, lambda: signs, 0.3)
    time.sleep(0.5)
    assert not lost.done()  # they may be loading
    watch.hear()
    assert lost.result(5).startswith("rank 1 has shown no sign of life for 0.3 s")
    stop.set()
    thread.join()
    watch.close()


def test_a_sign_is_given_before_the_first_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank that is stopped right after it came would never be missed."""
    monkeypatch.setattr(RankWatch, "TURN", 1000.0)
    given: list[int] = []
    watch, _ = lost_by({}, lambda: given.append(1) or [], 0.3)  # type: ignore[func-returns-value]
    assert given
    watch.close()


def test_a_rank_that_this_one_ends_is_not_missed() -> None:
    mine, other = socket.socketpair()
    watch, lost = lost_by({1: mine}, list, 10.0)
    watch.close()
    other.close()
    time.sleep(0.05)
    assert not lost.done()


def test_what_a_follower_says_must_be_words(meeting: Meeting) -> None:
    one = connect(meeting.address, 1.0)
    send(one, FrameKind.HELLO, TOKEN + pack_words([{"rank": 1}]))
    assert receive(one) is None
    one.close()
    meeting.join(1)
    meeting.join(2)
    meeting.leader.result(5)
