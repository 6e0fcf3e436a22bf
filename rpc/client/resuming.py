"""A stream that outlives its server: where one is lost, the next one goes on from the tokens that there are.

Servers of the same model that compute alike give the tokens that the first one would have given: draws depend on the
seed, which the first message tells, and on the position alone. `rpc.client.resuming_async` is the same for asyncio.
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
LEAST = 1_000_000  # nanoseconds: a server takes no time of 0


class Progress:
    """What is known of one request's stream, whoever makes the calls: `begin` before each, `take` each message, and ask
    `pause` whether there is a next one. request: what the server of these tries is asked.

    A request for several sequences goes on elsewhere only where none has a token yet: their outputs cannot be given as
    one prefix.
    """

    def __init__(self, tries: Tries, request: pb.StreamGenerateRequest) -> None:
        self._tries = tries
        self.request = pb.StreamGenerateRequest()
        self.request.CopyFrom(request)
        self._wants_ids = request.spec.output.token_ids
        self.request.spec.output.token_ids = True  # what was lost is known by its tokens
        sampling = self.request.spec.sampling
        self._sampled = not sampling.HasField("beam_search")
        self._one = self._sampled and sampling.sequence_count <= 1
        self._bound = False  # nobody can go on from what there is
        self._ended: set[int] = set()
        self._began = time.monotonic_ns()
        self._given = {
            name: getattr(request.spec, name).ToNanoseconds() for name in TIMES if request.spec.HasField(name)
        }
        self._before = 0

    @property
    def server(self) -> str:
        """That is asked."""
        return self._tries.server

    def begin(self) -> float | None:
        """The next server is asked; seconds that are left for it."""
        left = self._tries.begin()
        if not self._tries.first:
            self.request.request_id = ""  # a server whose connection broke may not have missed its client yet
        self._before = len(self.request.spec.output_prefix.ids)
        self._deduct()
        return left

    def take(self, message: pb.StreamGenerateResponse) -> pb.StreamGenerateResponse:
        """The message as its reader asked for it."""
        spec = self.request.spec
        if self._sampled and message.HasField("prompt_info"):
            spec.sampling.seed = message.prompt_info.seed
        for delta in message.deltas:
            if self._one:
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
        """All sequences have ended: if the call fails now, all that was lost is the word that nothing more comes."""
        return len(self._ended) >= max(1, self.request.spec.sampling.sequence_count)

    def pause(self, failure: Failure) -> float | None:
        """The call ended with this: seconds before the next one, None where no other server can mend it."""
        grown = len(self.request.spec.output_prefix.ids) > self._before
        return None if self._bound else self._tries.pause(failure, grown)

    def _deduct(self) -> None:
        """What servers before this one took of the times that the request has, they took of its own: the next one gets
        what is left. Who has a token has been scheduled.
        """
        spent, spec = time.monotonic_ns() - self._began, self.request.spec
        for name, given in self._given.items():
            getattr(spec, name).FromNanoseconds(min(given, max(LEAST, given - spent)))
        if spec.output_prefix.ids:
            spec.ClearField("max_queue_time")


class Resuming:
    """One request. channel_to: the open channel to a server. metadata: of each call."""

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
        """No more is wanted; its reader gets the end of a cancelled call. On any thread."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    @property
    def server(self) -> str:
        """That was asked last."""
        return self._progress.server

    def messages(self) -> Generator[pb.StreamGenerateResponse]:
        """As StreamGenerate gives them, each token once. Raises grpc.RpcError for what no other server can mend."""
        while True:
            try:
                yield from self._of_one_server()
                return
            except grpc.RpcError as error:
                if self._progress.complete:
                    return
                pause = None if self._cancelled.is_set() else self._progress.pause(failure_of(error))
                if pause is None:
                    raise
                self._cancelled.wait(pause)

    def _of_one_server(self) -> Iterator[pb.StreamGenerateResponse]:
        progress = self._progress
        left = progress.begin()
        stub = pb_grpc.GenerationServiceStub(self._channel_to(progress.server))
        self._call = stub.StreamGenerate(progress.request, timeout=left, metadata=self._metadata)
        if self._cancelled.is_set():
            self._call.cancel()
        try:
            for message in self._call:
                yield progress.take(message)
        finally:
            self._call.cancel()
