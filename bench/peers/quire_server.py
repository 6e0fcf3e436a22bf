"""Runs Quire like its users: `quire serve`, and a client over gRPC with a stream a request, one token a message.

python -m bench.peers.quire_server MODEL KV_TOKENS [QUANTIZATION]
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from grpc import aio
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from bench.peers.quire_engine import SEQUENCES, kv_memory
from bench.peers.worker import Trace, serve
from bench.peers.workloads import PeerRequest, Workload
from bench.serving import started
from rpc.distribution import own_version


class QuireServer:
    """Quire's server as a `PeerEngine`."""

    def __init__(self, model: str, kv_tokens: str, quantization: str | None = None) -> None:
        self.version = own_version()
        self._life = ExitStack()
        memory = str(kv_memory(model, int(kv_tokens)))
        flags = (
            "--max-batched-tokens", "2048", "--max-sequences", str(SEQUENCES), "--max-queue-time", "600",
            "--kv-cache-memory", memory, *(() if quantization is None else ("--quantization", quantization)),
        )  # fmt: skip
        self._address = self._life.enter_context(started("--model", model, *flags)).address

    def run(self, workload: Workload) -> Sequence[Trace]:
        return asyncio.run(self._run(workload.requests))

    async def _run(self, requests: list[PeerRequest]) -> list[Trace]:
        async with aio.insecure_channel(self._address) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            return list(await asyncio.gather(*(self._one(stub, asked) for asked in requests)))

    async def _one(self, stub: pb_grpc.GenerationServiceStub, asked: PeerRequest) -> Trace:
        await asyncio.sleep(asked.arrives)
        spec = pb.GenerationSpec(
            token_ids=pb.TokenIds(ids=asked.prompt),
            sampling=pb.SamplingParameters(temperature=0.0),
            stopping=pb.StoppingCriteria(max_tokens=asked.tokens, ignore_eos=True),
            output=pb.OutputOptions(token_ids=True),
        )
        trace = Trace()
        async for message in stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec)):
            for delta in message.deltas:
                trace.add(time.perf_counter(), delta.token_ids)
        return trace


if __name__ == "__main__":
    serve(lambda: QuireServer(*sys.argv[1:]))
