"""A stream that survives the loss of a server: the next server goes on from the tokens received.

The result is the one of the first server, if the servers have the same model and compute alike. A draw depends only on
the position and on the seed, which the first message has. `rpc.client.resuming_async` is the same for asyncio.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import grpc
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from rpc.client.failures import Failure, failure_of
from rpc.client.security import Metadata
from rpc.client.tries import Tries

TIMES = ("max_time", "max_queue_time")
LEAST_TIME = 1_000_000  # nanoseconds: a server takes no time of 0


class Progress:
    """State of one request's stream over its calls, sync or asyncio.

    Call `begin` before each call, `record` with each message, and `pause` after a failure. Invariant: the output prefix
    of `request` is what the reader has of a single sampled sequence. So the next server computes nothing twice.

    A request for several sequences moves only while none has a token: the request has one output prefix, and
    cannot carry several.

    Args:
        tries: Servers and retries of this request.
        request: The message to send first; it is copied.

    Attributes:
        request: The message for the next call.
    """

    def __init__(self, tries: Tries, request: pb.StreamGenerateRequest) -> None:
        self._tries = tries
        self.request = pb.StreamGenerateRequest()
        self.request.CopyFrom(request)
        self._wants_ids = request.spec.output.token_ids
        self.request.spec.output.token_ids = True  # the prefix for the next server is made of them
        sampling = self.request.spec.sampling
        self._sampled = not sampling.HasField("beam_search")
        self._single = self._sampled and sampling.sequence_count <= 1
        self._bound = False  # no other server can go on
        self._ended: set[int] = set()
        self._began = time.monotonic_ns()
        self._times = {
            name: getattr(request.spec, name).ToNanoseconds() for name in TIMES if request.spec.HasField(name)
        }
        self._prefix_before = 0

    @property
    def server(self) -> str:
        """HOST:PORT of the current try."""
        return self._tries.server

    def begin(self) -> float | None:
        """Moves to the next server, and brings `request` up to date.

        Returns:
            Seconds left of the timeout; None without one.
        """
        left = self._tries.begin()
        if not self._tries.first:
            self.request.request_id = ""  # a server whose connection broke may not have missed its client yet
        self._prefix_before = len(self.request.spec.output_prefix.ids)
        self._deduct_spent_time()
        return left

    def record(self, message: pb.StreamGenerateResponse) -> pb.StreamGenerateResponse:
        """Records a message's tokens, and returns it without fields that its reader did not ask for."""
        spec = self.request.spec
        if self._sampled and message.HasField("prompt_info"):
            spec.sampling.seed = message.prompt_info.seed
        for delta in message.deltas:
            if self._single:
                spec.output_prefix.ids.extend(delta.token_ids)
            elif delta.token_ids:
                self._bound = True
            if delta.finish_reason:
                self._ended.add(delta.index)
            if not self._wants_ids:
                del delta.token_ids[:]
        return message

    @property
    def complete(self) -> bool:
        """Whether all sequences have ended. A call that fails then lost nothing but its status."""
        return len(self._ended) >= max(1, self.request.spec.sampling.sequence_count)

    def pause(self, failure: Failure) -> float | None:
        """Returns seconds until the next try after a failed call; None if there is none."""
        grown = len(self.request.spec.output_prefix.ids) > self._prefix_before
        return None if self._bound else self._tries.pause(failure, grown)

    def _deduct_spent_time(self) -> None:
        """Gives the next server what earlier ones left of the request's times."""
        spent, spec = time.monotonic_ns() - self._began, self.request.spec
        for name, limit in self._times.items():
            getattr(spec, name).FromNanoseconds(min(limit, max(LEAST_TIME, limit - spent)))
        if spec.output_prefix.ids:  # it left a queue already
            spec.ClearField("max_queue_time")


class Resuming:
    """Stream of one request that goes on at the next server.

    Args:
        tries: Servers and retries of this request.
        request: The message to send; it is copied.
        channel_to: Returns the open connection to a server.
        metadata: gRPC metadata of each call.
    """

    def __init__(
        self,
        tries: Tries,
        request: pb.StreamGenerateRequest,
        channel_to: Callable[[str], grpc.Channel],
        metadata: Metadata = (),
    ) -> None:
        self._progress = Progress(tries, request)
        self._channel_to, self._metadata = channel_to, metadata
        self._call: Any = None
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Cancels the stream, from any thread; its reader gets the error of a cancelled call."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    @property
    def server(self) -> str:
        """HOST:PORT of the server that was asked last."""
        return self._progress.server

    def messages(self) -> Generator[pb.StreamGenerateResponse]:
        """Yields the messages of StreamGenerate, each token once.

        Raises:
            grpc.RpcError: The request failed, and another try cannot help.
        """
        while True:
            try:
                yield from self._next_server_messages()
                return
            except grpc.RpcError as error:
                if self._progress.complete:  # only the status of the call was lost
                    return
                pause = None if self._cancelled.is_set() else self._progress.pause(failure_of(error))
                if pause is None:
                    raise
                self._cancelled.wait(pause)

    def _next_server_messages(self) -> Iterator[pb.StreamGenerateResponse]:
        progress = self._progress
        left = progress.begin()
        stub = pb_grpc.GenerationServiceStub(self._channel_to(progress.server))
        self._call = stub.StreamGenerate(progress.request, timeout=left, metadata=self._metadata)
        if self._cancelled.is_set():  # `cancel` came while no call was open
            self._call.cancel()
        try:
            for message in self._call:
                yield progress.record(message)
        finally:
            self._call.cancel()
