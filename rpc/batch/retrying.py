"""Runs a batch job's requests again until each has a final answer."""

import asyncio
from typing import Any

from quire.v1 import generation_service_pb2 as pb

from rpc.batch.retries import LONGEST_PAUSE, PAUSE, RetryPolicy
from rpc.batch.runners import RequestRunner
from rpc.client.security import Metadata
from rpc.frontend.errors import RequestFailed
from rpc.gateway.served import ServedModels


class RetryingRunner:
    """Tries requests again as long as the job's `RetryPolicy` allows.

    Attributes:
        served: Models and token texts, for lines in OpenAI's form.
    """

    def __init__(self, runner: RequestRunner, policy: RetryPolicy) -> None:
        self._runner, self._policy = runner, policy
        self.served = ServedModels(self)

    async def run(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        """Returns the response.

        Raises:
            RequestFailed: The request failed, and another try cannot help.
            JobStoppedError: The job cannot go on now.
        """
        pause = PAUSE
        while True:
            try:
                response = await self._runner.run(request)
            except RequestFailed as failure:
                if failure.retry_after is None:
                    self._policy.succeeded()  # an answer, if a bad one
                    raise
                pause = await self._wait(failure, failure.retry_after, pause)
            else:
                self._policy.succeeded()
                return response

    async def ask(self, stub: type, method: str, request: Any, metadata: Metadata) -> Any:
        """Makes a unary call for `ServedModels`. Raises RequestFailed, JobStoppedError."""
        pause = PAUSE
        while True:
            try:
                return await self._runner.ask(stub, method, request, metadata)
            except RequestFailed as failure:
                if failure.retry_after is None:
                    raise
                pause = await self._wait(failure, failure.retry_after, pause)

    async def _wait(self, failure: RequestFailed, retry_after: float, pause: float) -> float:
        """Waits until the next try, and returns the pause after that. Raises JobStoppedError."""
        self._policy.busy(failure.message)
        await asyncio.sleep(max(pause, min(retry_after, LONGEST_PAUSE)))
        return min(2 * pause, LONGEST_PAUSE)
