"""Looks at a server again and again, and connects again where it goes away."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration
from quire.v1 import admin_service_pb2 as pb
from quire.v1 import admin_service_pb2_grpc as pb_grpc

from rpc.addresses import check_server
from rpc.client.channels import CHANNEL_OPTIONS
from rpc.client.errors import QuireError, error_of
from rpc.client.security import Security
from rpc.observe.rates import rates
from rpc.terminal.snapshot import Snapshot, States

SECONDS = 15  # for one answer: an engine gives its page map between two steps
REQUESTS = 50  # more do not fit on a screen
KEPT = 300  # intervals
AGAIN = 1.0  # seconds between two tries to reach a server
HOPELESS = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,  # another service's port
}


class Watch:
    """Of one server, every `interval` seconds, on a thread of its own, in `with`.

    Raises:
        ValueError: The server is not of the form HOST:PORT.
    """

    def __init__(self, server: str, security: Security, interval: float) -> None:
        check_server(server)  # here, since the thread has nobody to tell
        self._server, self._security = server, security
        self._interval = Duration()
        self._interval.FromNanoseconds(round(interval * 1e9))
        self._seen = Snapshot(server)
        self._news: SimpleQueue[Snapshot | QuireError] = SimpleQueue()
        self._over = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="quire-watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(2.0)

    def next(self, seconds: float) -> Snapshot | None:
        """The next look, None where there is none within this time. Raises QuireError where no other try can help."""
        try:
            news = self._news.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(news, QuireError):
            raise news
        return news

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with self._security.channel(self._server, CHANNEL_OPTIONS) as channel:
                    for snapshot in self._looks(pb_grpc.AdminServiceStub(channel)):
                        self._seen = snapshot
                        self._news.put(snapshot)
            except grpc.RpcError as error:
                failure = error_of(error, self._server)
                if failure.code in HOPELESS:
                    self._news.put(failure)
                    return
                away = (*self._seen.rates, None)[-KEPT:]
                self._seen = replace(self._seen, trouble=str(failure), rates=away, pages={})
                self._news.put(self._seen)
            self._over.wait(AGAIN)

    def _looks(self, stub: pb_grpc.AdminServiceStub) -> Iterator[Snapshot]:
        """Raises grpc.RpcError."""
        metadata = self._security.metadata
        info = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=SECONDS, metadata=metadata)
        self._call = stub.WatchLoad(pb.WatchLoadRequest(interval=self._interval), metadata=metadata)
        for message in self._call:
            if self._over.is_set():
                return
            load, before = message.load, self._seen
            # After a time away the totals may be another server's, and their differences are of no one interval.
            new = None if before.load is None or before.trouble else rates(before.load, load)
            known = before.rates if before.load is None else (*before.rates, new)[-KEPT:]
            asked = pb.ListRequestsRequest(max_count=REQUESTS)
            requests = stub.ListRequests(asked, timeout=SECONDS, metadata=metadata)
            yield Snapshot(self._server, info, load, self._pages(stub, load), requests, known)

    def _pages(self, stub: pb_grpc.AdminServiceStub, load: pb.Load) -> dict[int, States]:
        """Of the engines that answer."""
        found = dict[int, States]()
        for replica in load.replicas:
            if replica.state != pb.REPLICA_STATE_STARTING:
                try:
                    asked = pb.GetPageMapRequest(replica=replica.number)
                    answer = stub.GetPageMap(asked, timeout=SECONDS, metadata=self._security.metadata)
                except grpc.RpcError:
                    continue  # it ends, or is in a long step; where the server has gone, its load says so next
                found[replica.number] = np.array(answer.states, np.uint8)
        return found


def look_twice(server: str, security: Security, interval: float) -> Snapshot:
    """A snapshot with rates, of this long. Raises QuireError, OSError where the server cannot be reached."""
    with Watch(server, security, interval) as watch:
        deadline = time.monotonic() + SECONDS + interval
        while time.monotonic() < deadline:
            snapshot = watch.next(0.1)
            if snapshot is not None and snapshot.trouble:
                raise ConnectionError(snapshot.trouble)
            if snapshot is not None and snapshot.rates:
                return snapshot
    raise TimeoutError(f"{server} has not answered for {SECONDS} s")
