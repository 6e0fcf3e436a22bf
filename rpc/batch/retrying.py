"""Runs a batch job's requests until each has its answer, whatever passes by itself."""

import asyncio
from typing import Any

from quire.v1 import generation_service_pb2 as pb

from rpc.batch.patience import LONGEST_PAUSE, PAUSE, SUSPECT, Patience
from rpc.batch.runners import Runner
from rpc.client.security import Metadata
from rpc.frontend.errors import RequestFailed
from rpc.gateway.served import Served


class RetryingRunner:
    """Tries again for as long as a job's `Patience` lasts."""

    def __init__(self, runner: Runner, patience: Patience) -> None:
        self._runner, self._patience = runner, patience
        self.served = Served(self)

    async def run(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        """Returns the answer. Raises RequestFailed for a failure that will not change, JobStoppedError."""
        deaths, pause = 0, PAUSE
        while True:
            suspect = deaths >= SUSPECT
            try:
                async with self._patience.turn(suspect):
                    response = await self._runner.run(request)
            except RequestFailed as failure:
                if failure.retry_after is None:
                    self._patience.succeeded()  # an answer, if a bad one
                    raise
                if failure.reason == "ENGINE_FAILED":
                    deaths += 1
                    if suspect:
                        self._patience.died_alone(failure)
                        raise
                pause = await self._wait(failure, failure.retry_after, pause)
            else:
                self._patience.succeeded()
                return response

    async def ask(self, stub: type, method: str, request: Any, metadata: Metadata) -> Any:
        """Asks what `Served` asks of a server. Raises RequestFailed, JobStoppedError."""
        pause = PAUSE
        while True:
            try:
                return await self._runner.ask(stub, method, request, metadata)
            except RequestFailed as failure:
                if failure.retry_after is None:
                    raise
                pause = await self._wait(failure, failure.retry_after, pause)

    async def _wait(self, failure: RequestFailed, retry_after: float, pause: float) -> float:
        """Waits until the next try; returns the pause after that. Raises JobStoppedError."""
        self._patience.busy(failure.message)
        await asyncio.sleep(max(pause, min(retry_after, LONGEST_PAUSE)))
        return min(2 * pause, LONGEST_PAUSE)
