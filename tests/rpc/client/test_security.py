"""A client keeps its token to itself where others could read it."""

import pytest

from rpc.client.channels import SyncChannels
from rpc.client.security import Security

TOKEN = "a" * 20


@pytest.mark.parametrize("server", ["10.0.0.5:50051", "example.com:1", "[2001:db8::1]:5"])
def test_a_token_does_not_travel_in_the_clear(server: str) -> None:
    with pytest.raises(ValueError, match="could be read on its way"):
        Security(TOKEN).channel(server, ())
    for security in (Security(TOKEN, tls=True), Security(TOKEN, plaintext=True), Security()):
        security.channel(server, ()).close()


@pytest.mark.parametrize("server", ["127.0.0.1:1", "localhost:1", "[::1]:1"])
def test_on_this_machine_it_may(server: str) -> None:
    """`channel` raises where the token could be read on its way."""
    Security(TOKEN).channel(server, ()).close()


@pytest.mark.parametrize("token", ["with space", "t\u00f6ken", "line\n"])
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="characters"):
        Security(token)


def test_a_client_that_is_closed_opens_nothing() -> None:
    channels = SyncChannels()
    channels.channel_to("127.0.0.1:1")
    channels.close()
    with pytest.raises(RuntimeError, match="closed"):
        channels.channel_to("127.0.0.1:1")
