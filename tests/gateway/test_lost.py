"""The gateway's log about servers that do not answer."""

import grpc
import pytest

from rpc.client.failures import Failure
from rpc.gateway.lost import MOST_LOGGED, LoggedTries, LostServers

REFUSED = Failure(grpc.StatusCode.UNAVAILABLE, "connection refused")


def test_a_reason_is_told_once_until_the_server_answers_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "quire.gateway")
    lost = LostServers()
    lost.answered("a:1")
    for _ in range(3):
        lost.failed("a:1", REFUSED)
        lost.failed("b:1", REFUSED)
    lost.failed("a:1", Failure(grpc.StatusCode.UNAVAILABLE, "no certificate"))
    lost.answered("a:1")
    lost.answered("a:1")
    lost.failed("a:1", REFUSED)
    assert caplog.messages == [
        "server a:1 does not answer: connection refused",
        "server b:1 does not answer: connection refused",
        "server a:1 does not answer: no certificate",
        "server a:1 answers again",
        "server a:1 does not answer: connection refused",
    ]


def test_reasons_that_differ_each_time_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    lost = LostServers()
    for number in range(1000):
        lost.failed("a:1", Failure(grpc.StatusCode.UNAVAILABLE, f"reset {number}"))
    assert len(caplog.messages) == MOST_LOGGED


def test_what_a_server_itself_says_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    lost = LostServers()
    lost.failed("a:1", Failure(grpc.StatusCode.UNAVAILABLE, "it drains", "DRAINING"))
    lost.failed("a:1", Failure(grpc.StatusCode.UNAUTHENTICATED, "no token"))
    assert not caplog.messages


def test_a_server_that_is_lost_is_told_where_the_next_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    tries = LoggedTries(LostServers(), ["a:1", "b:1"], 60)
    tries.begin()
    assert tries.pause(REFUSED) == 0
    tries.begin()
    assert tries.server == "b:1"
    assert caplog.messages == ["server a:1 does not answer: connection refused"]
