"""Connections of the synchronous client, and the gRPC options of both clients."""

import threading

import grpc

from rpc.client.security import OPEN, Security

CALLS_A_CONNECTION = 100  # a server takes 128 by default; more would wait in the client
CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # else the channels to a server would share a connection
    ("grpc.max_receive_message_length", -1),  # logprobs of a long prompt come in one message
    ("grpc.keepalive_time_ms", 20_000),  # a server that is silent for 30 seconds is lost
    ("grpc.keepalive_timeout_ms", 10_000),
)


class SyncChannels:
    """One connection to each server, shared by threads."""

    def __init__(self, security: Security = OPEN) -> None:
        self._security, self._lock = security, threading.Lock()
        self._open: dict[str, grpc.Channel] = {}
        self._closed = False

    def channel_to(self, server: str) -> grpc.Channel:
        """Returns the connection to HOST:PORT, opened at its first use.

        Raises:
            RuntimeError: After `close`.
            ValueError: The address is none, or the token could be read on its way there.
        """
        with self._lock:  # two threads must not open two connections, nor open one after `close`
            if self._closed:
                raise RuntimeError("the client is closed")
            if server not in self._open:
                self._open[server] = self._security.channel(server, CHANNEL_OPTIONS)
            return self._open[server]

    def close(self) -> None:
        """Closes all connections; calls that run are cancelled."""
        with self._lock:
            channels, self._open, self._closed = list(self._open.values()), {}, True
        for channel in channels:
            channel.close()
