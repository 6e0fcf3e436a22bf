"""A client whose server dies goes on with another one."""

import signal
import threading
from collections.abc import Iterator

import pytest
from quire.v1 import generation_service_pb2 as pb

from rpc.client import Client, Stream, UnavailableError, tries
from tests.support.forking import run_quire
from tests.support.server import RunningServer, running_server, stream_request

TOKENS = 600


@pytest.fixture
def servers() -> Iterator[list[RunningServer]]:
    with running_server() as first, running_server() as second:
        yield [first, second]


def sampled(**sampling: float) -> pb.StreamGenerateRequest:
    request = stream_request("ROMEO:", TOKENS, temperature=0.9, frequency_penalty=0.3, **sampling)
    request.spec.output.token_ids = False
    return request


def read(stream: Stream, after: int = 0, then: threading.Event | None = None) -> tuple[str, int]:
    """Returns the text and the number of tokens; sets the event after a number of messages."""
    text, tokens = "", 0
    for number, message in enumerate(stream):
        for delta in message.deltas:
            assert delta.first_position == tokens, "a gap or a duplicate"
            assert not delta.token_ids, "they were not asked for"
            text, tokens = text + delta.text, tokens + delta.token_count
        if then is not None and number == after:
            then.set()
    return text, tokens


def test_a_stream_goes_on_with_the_next_server(servers: list[RunningServer]) -> None:
    first, second = servers
    request, going = sampled(seed=5), threading.Event()
    expected = read(Client(second.address, timeout=60).stream_request(request))

    def strike() -> None:
        assert going.wait(30)
        first.process.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=strike)
    killer.start()
    stream = Client([first.address, second.address], timeout=60).stream_request(request)
    assert read(stream, 20, going) == expected
    killer.join()
    first.process.wait()
    assert stream.server == second.address
    assert expected[1] == TOKENS
    said = run_quire(
        "generate", "ROMEO:", "--server", first.address, "--server", second.address, "--max-tokens=5", "--min-tokens=5"
    )
    assert said.returncode == 0
    assert "5 generated tokens" in said.stderr


def test_without_any_server_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "PAUSE", 0.0)
    with pytest.raises(UnavailableError):
        read(Client(["127.0.0.1:1", "127.0.0.1:2"], timeout=20).stream_request(sampled()))
