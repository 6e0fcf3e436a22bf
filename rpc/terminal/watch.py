"""Follows a server's state, and connects again when the server goes away."""

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

SECONDS = 15  # for one response: an engine gives its page map between two steps
REQUESTS = 50  # more do not fit on a screen
KEPT = 300  # intervals
AGAIN = 1.0  # seconds between two tries to reach a server
HOPELESS = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,  # another service's port
}


class ServerWatch:
    """Follows one server on a thread of its own. Use it as a context manager.

    Args:
        server: HOST:PORT of the admin port.
        security: Token of an operator.
        interval: Seconds between two snapshots.

    Raises:
        ValueError: The server is not of the form HOST:PORT.
    """

    def __init__(self, server: str, security: Security, interval: float) -> None:
        check_server(server)  # before the thread, whose exceptions would be lost
        self._server, self._security = server, security
        self._interval = Duration()
        self._interval.FromNanoseconds(round(interval * 1e9))
        self._newest = Snapshot(server)
        self._snapshots: SimpleQueue[Snapshot | QuireError] = SimpleQueue()
        self._over = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="quire-watch", daemon=True)

    def __enter__(self) -> "ServerWatch":
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
        """Returns the next snapshot; None if none comes within `seconds`.

        Raises:
            QuireError: The server cannot be followed, and another try cannot help.
        """
        try:
            item = self._snapshots.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(item, QuireError):
            raise item
        return item

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with self._security.channel(self._server, CHANNEL_OPTIONS) as channel:
                    for snapshot in self._follow(pb_grpc.AdminServiceStub(channel)):
                        self._newest = snapshot
                        self._snapshots.put(snapshot)
            except grpc.RpcError as error:
                failure = error_of(error, self._server)
                if failure.code in HOPELESS:
                    self._snapshots.put(failure)
                    return
                away = (*self._newest.rates, None)[-KEPT:]
                self._newest = replace(self._newest, trouble=str(failure), rates=away, pages={})
                self._snapshots.put(self._newest)
            self._over.wait(AGAIN)

    def _follow(self, stub: pb_grpc.AdminServiceStub) -> Iterator[Snapshot]:
        """Yields a snapshot for each message of the server's load. Raises grpc.RpcError."""
        metadata = self._security.metadata
        info = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=SECONDS, metadata=metadata)
        self._call = stub.WatchLoad(pb.WatchLoadRequest(interval=self._interval), metadata=metadata)
        for message in self._call:
            if self._over.is_set():
                return
            load, before = message.load, self._newest
            # After a time away the totals may be another server's, and their differences span several intervals.
            new = None if before.load is None or before.trouble else rates(before.load, load)
            known = before.rates if before.load is None else (*before.rates, new)[-KEPT:]
            listing = pb.ListRequestsRequest(max_count=REQUESTS)
            requests = stub.ListRequests(listing, timeout=SECONDS, metadata=metadata)
            yield Snapshot(self._server, info, load, self._pages(stub, load), requests, known)

    def _pages(self, stub: pb_grpc.AdminServiceStub, load: pb.Load) -> dict[int, States]:
        """Returns the page maps of the engines that answer."""
        found = dict[int, States]()
        for replica in load.replicas:
            if replica.state != pb.REPLICA_STATE_STARTING:
                try:
                    request = pb.GetPageMapRequest(replica=replica.number)
                    page_map = stub.GetPageMap(request, timeout=SECONDS, metadata=self._security.metadata)
                except grpc.RpcError:
                    continue  # the engine ends, or is in a long step; if the server is gone, its load fails next
                found[replica.number] = np.array(page_map.states, np.uint8)
        return found


def look_twice(server: str, security: Security, interval: float) -> Snapshot:
    """Returns a snapshot with rates over one interval. Raises QuireError, and OSError if no server answers."""
    with ServerWatch(server, security, interval) as watch:
        deadline = time.monotonic() + SECONDS + interval
        while time.monotonic() < deadline:
            snapshot = watch.next(0.1)
            if snapshot is not None and snapshot.trouble:
                raise ConnectionError(snapshot.trouble)
            if snapshot is not None and snapshot.rates:
                return snapshot
    raise TimeoutError(f"{server} has not answered for {SECONDS} s")
