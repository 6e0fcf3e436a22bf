"""Kills engines at random moments under load and checks every stream's history: nothing lost, nothing doubled.

    python -m tests.chaos.soak --kills 1000

Streams run all the time; each is compared with what an undisturbed run of it gave. Prints what happened as it goes, and
at the end one line of JSON. Ends with code 1 where a history was wrong.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from grpc import aio
from quire.v1 import admin_service_pb2 as admin_pb
from quire.v1 import admin_service_pb2_grpc as admin_pb_grpc
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from tests.support.server import RunningServer, running_server
from tests.support.watching_client import History, watch

KINDS = 24  # of streams
HOWS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass
class Soak:
    """gaps: longest wait of each stream that ran while an engine died. wrong: what histories had of it. spared: engines
    that had a suspected request for themselves when their turn to die came.
    """

    server: RunningServer
    tokens: int
    chance: random.Random
    expected: dict[int, History] = field(default_factory=dict)
    streams: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    spared: int = 0
    gaps: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    stopping: bool = False

    async def run(self, kills: int, streams: int, pause: float) -> None:
        direct = [("grpc.enable_http_proxy", 0)]
        async with (
            aio.insecure_channel(self.server.address, options=direct) as channel,
            aio.insecure_channel(self.server.admin, options=direct) as admin,
        ):
            stub, self.admin = pb_grpc.GenerationServiceStub(channel), admin_pb_grpc.AdminServiceStub(admin)
            undisturbed = await asyncio.gather(*(watch(stub, i, self.tokens, asyncio.Event()) for i in range(KINDS)))
            self.expected = dict(enumerate(undisturbed))
            workers = [asyncio.create_task(self._work(stub)) for _ in range(streams)]
            while sum(self.kills.values()) < kills:
                await asyncio.sleep(self.chance.uniform(0.0, pause))
                with suppress(ProcessLookupError):  # it has just ended, of the strike before
                    await self._strike()
            self.stopping = True
            await asyncio.gather(*workers)

    async def _work(self, stub: pb_grpc.GenerationServiceStub) -> None:
        while not self.stopping:
            number, kills = self.chance.randrange(KINDS), sum(self.kills.values())
            history = await watch(stub, number, self.tokens, asyncio.Event())
            self.streams += 1
            if sum(self.kills.values()) > kills:
                self.gaps.append(history.gap)
            self._compare(number, history)

    def _compare(self, number: int, history: History) -> None:
        expected = self.expected[number]
        if history.wrong or history.status != "OK":
            self.wrong.append(f"stream {number}: {history.status}: {history.wrong}")
        elif (history.tokens, history.texts, history.finishes) != (expected.tokens, expected.texts, expected.finishes):
            self.wrong.append(f"stream {number} has other tokens than when nothing died")

    async def _strike(self) -> None:
        """At one of the engines that serve, where there are two: the last one would end no stream, but stop all.

        Not at one that has a suspected request for itself, which would be found guilty. The engine stands still while
        this is asked: a request that comes to it meanwhile never runs there. One such death counts against no request.
        """
        engines = await self._engines()
        if len(engines) < 2:
            await asyncio.sleep(0.05)
            return
        process = self.chance.choice(list(engines))
        os.kill(process, signal.SIGSTOP)
        if (await self._engines()).get(process) == admin_pb.REPLICA_STATE_ISOLATED:
            os.kill(process, signal.SIGCONT)
            self.spared += 1
            return
        how = self.chance.choices(list(HOWS), (9, 1))[0]
        os.kill(process, HOWS[how])
        self.kills[how] += 1
        if sum(self.kills.values()) % 10 == 0:
            print(f"{sum(self.kills.values())} deaths, {self.streams} streams, {len(self.wrong)} wrong", flush=True)

    async def _engines(self) -> dict[int, admin_pb.ReplicaState]:
        """State of those that serve, by process."""
        replicas = (await self.admin.ListReplicas(admin_pb.ListReplicasRequest())).replicas
        serving = (one for one in replicas if one.state != admin_pb.REPLICA_STATE_STARTING)
        return {int(one.place.removeprefix("process ")): one.state for one in serving}

    def summary(self, seconds: float) -> dict[str, object]:
        gaps = sorted(self.gaps) or [0.0]
        return {
            "deaths": dict(self.kills),
            "spared": self.spared,
            "streams": self.streams,
            "streams_during_a_death": len(self.gaps),
            "wrong": len(self.wrong),
            "longest_gap_median_s": round(statistics.median(gaps), 3),
            "longest_gap_worst_s": round(gaps[-1], 3),
            "seconds": round(seconds),
        }


def soak(
    kills: int, replicas: int = 3, streams: int = 12, tokens: int = 120, pause: float = 0.5, seed: int = 1
) -> Soak:
    """Returns what happened."""
    flags = ("--replicas", str(replicas), "--kv-cache-memory", "64MiB")
    with running_server(*flags) as server:
        running, began = Soak(server, tokens, random.Random(seed)), time.monotonic()
        asyncio.run(running.run(kills, streams, pause))
        print(json.dumps(running.summary(time.monotonic() - began)), flush=True)
        for line in running.wrong[:20]:
            print(line, flush=True)
        return running


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--pause", type=float, default=0.5, help="Most seconds between two strikes.")
    parser.add_argument("--seed", type=int, default=1)
    sys.exit(bool(soak(**vars(parser.parse_args())).wrong))
