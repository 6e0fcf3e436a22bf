"""A stream that outlives its server: where one is lost, the next one goes on from the tokens that there are.

Servers of the same model that compute alike give the tokens that the first one would have given: draws depend on the
seed, which the first message tells, and on the position alone.
"""

import itertools
import time
from collections.abc import Iterator, Sequence

import grpc
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

LOST = (grpc.StatusCode.UNAVAILABLE,)
ROUNDS, PAUSE = 3, 0.5  # tries of all servers without a new token; seconds between two rounds
TIMES = ("max_time", "max_queue_time")
LEAST = 1_000_000  # nanoseconds: a server takes no time of 0
OPTIONS = [("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0)]


class Resuming:
    """One request. servers: HOST:PORT of each, the first of which is asked first. server: the one that was asked last.

    A request for several sequences goes on elsewhere only where none has a token yet: their outputs cannot be given as
    one prefix.
    """

    def __init__(self, servers: Sequence[str], request: pb.StreamGenerateRequest, timeout: float | None) -> None:
        self._servers = list(servers)
        self._request = pb.StreamGenerateRequest()
        self._request.CopyFrom(request)
        self._wants_ids = request.spec.output.token_ids
        self._request.spec.output.token_ids = True  # what was lost is known by its tokens
        self._bound = False  # nobody can go on from what there is
        self._ended: set[int] = set()
        self._began = time.monotonic_ns()
        self._given = {
            name: getattr(request.spec, name).ToNanoseconds() for name in TIMES if request.spec.HasField(name)
        }
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self.server = self._servers[0]

    def messages(self) -> Iterator[pb.StreamGenerateResponse]:
        """As StreamGenerate gives them, each token once. Raises grpc.RpcError for what no other server can mend."""
        known = self._request.spec.output_prefix.ids
        failures = 0  # since the last token
        for turn in itertools.count():
            self.server = self._servers[turn % len(self._servers)]
            before = len(known)
            try:
                yield from self._of_one_server()
                return
            except grpc.RpcError as error:
                if len(self._ended) >= max(1, self._request.spec.sampling.sequence_count):
                    return  # all that was lost is the word that nothing more comes
                failures = 1 if len(known) > before else failures + 1
                if error.code() not in LOST or not self._may_go_on() or failures >= ROUNDS * len(self._servers):
                    raise
                if failures % len(self._servers) == 0:
                    time.sleep(PAUSE)

    def _may_go_on(self) -> bool:
        return not self._bound and (self._deadline is None or time.monotonic() < self._deadline)

    def _of_one_server(self) -> Iterator[pb.StreamGenerateResponse]:
        spec = self._request.spec
        self._deduct()
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        with grpc.insecure_channel(self.server, options=OPTIONS) as channel:
            for message in pb_grpc.GenerationServiceStub(channel).StreamGenerate(self._request, timeout=left):
                if message.HasField("prompt_info") and not spec.sampling.HasField("beam_search"):
                    spec.sampling.seed = message.prompt_info.seed
                for delta in message.deltas:
                    if spec.sampling.sequence_count <= 1 and not spec.sampling.HasField("beam_search"):
                        spec.output_prefix.ids.extend(delta.token_ids)
                    elif delta.token_ids:
                        self._bound = True
                    if delta.finish_reason:
                        self._ended.add(delta.index)
                    if not self._wants_ids:
                        del delta.token_ids[:]
                yield message

    def _deduct(self) -> None:
        """What servers before this one took of the times that the request has, they took of its own: the next one gets
        what is left. Who has a token has been scheduled.
        """
        spent, spec = time.monotonic_ns() - self._began, self._request.spec
        for name, given in self._given.items():
            getattr(spec, name).FromNanoseconds(min(given, max(LEAST, given - spent)))
        if spec.output_prefix.ids:
            spec.ClearField("max_queue_time")
