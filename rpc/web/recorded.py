"""Recorded requests of a server with --record: which there are, and the timeline of one."""

import asyncio
import json
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.observe.records import RequestRecord
from rpc.web.recorded_process import FAILED, SECONDS

MODULE = "rpc.web.recorded_process"
KEPT = 50  # ended requests that are known
LIVE = 20  # live requests that are listed, oldest first


class RecordedRequests:
    """Recorded requests of this server's own clients. Make it before the engines start.

    A timeline is made by a process of its own, one at a time: a replay is Python that takes seconds, and would hold
    the interpreter of the event loop, and that of an engine on a thread.

    Args:
        frontend: The server's frontend.
        file: File of --record.
    """

    def __init__(self, frontend: Frontend, file: Path) -> None:
        self._frontend, self._file = frontend, file
        self._began = time.time()
        self._ended = deque[dict[str, Any]](maxlen=KEPT)
        self._one = asyncio.Lock()
        frontend.reporter.watchers.append(self._note)

    def listed(self) -> list[dict[str, Any]]:
        """Returns live requests, oldest first, then ended ones, newest first. No text is in it."""
        return [*self._live(), *self._ended]

    async def timeline(self, attempt: int) -> bytes:
        """Returns the timeline of a request as JSON.

        Args:
            attempt: Number of the request, as `listed` has it.

        Raises:
            RequestFailed: It is not in a recording on this machine, or its replay takes too long.
        """
        async with self._one:
            status, answer = await self._explain(attempt)
        if status == 0:
            return answer
        if status == FAILED:
            raise RequestFailed(**json.loads(answer))
        if status == -signal.SIGALRM:
            message = f"the replay takes more than {SECONDS} s: `quire explain` with the file has no such limit"
            raise RequestFailed("DEADLINE_EXCEEDED", "RECORDING_TOO_LONG", message)
        raise RuntimeError(f"the process that explains a recording ended with status {status}")

    async def _explain(self, attempt: int) -> tuple[int | None, bytes]:
        """Runs the process. Returns its exit status and its output. A cancelled call leaves no process."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", MODULE, str(self._file), repr(self._began), str(attempt)),
            stdin=DEVNULL,
            stdout=PIPE,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # its threads would take address space and do nothing
        )
        try:
            answer, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode, answer

    def _live(self) -> Iterator[dict[str, Any]]:
        for (tenant, request_id), live in list(self._frontend.requests.items())[:LIVE]:
            if live is not None and live.attempt:
                yield {
                    "attempt": live.attempt,
                    "request_id": request_id,
                    "tenant": tenant,
                    "outcome": None,
                    "seconds": time.monotonic() - live.started,
                    "prompt_tokens": len(live.stream.request.prompt),
                    "completion_tokens": live.stream.token_count,
                }

    def _note(self, record: RequestRecord) -> None:
        """Keeps what the list shows of a request that has ended."""
        if record.attempt:
            self._ended.appendleft(
                {
                    "attempt": record.attempt,
                    "request_id": record.request_id,
                    "tenant": record.spec.tenant,
                    "outcome": record.outcome,
                    "seconds": record.seconds,
                    "prompt_tokens": record.prompt_tokens,
                    "completion_tokens": record.completion_tokens,
                }
            )
