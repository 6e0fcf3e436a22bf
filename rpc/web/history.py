"""Rates of a server in each of the last seconds, for charts that begin before the dashboard is opened."""

import asyncio
import secrets
import time
from collections import deque
from typing import Any

from quire.v1 import admin_service_pb2 as pb

from rpc.frontend.frontend import Frontend
from rpc.observe.rates import Rates, rates
from rpc.services.load import load_of

INTERVAL = 1.0  # seconds
KEPT = 300  # intervals


class History:
    """Rates by interval, numbered from 1. `follow` must run on the frontend's loop.

    Args:
        frontend: The server's frontend.
        started: Start of the server, in seconds of time.monotonic.

    Attributes:
        run: Random id of this server's run; the numbers of another run do not continue these.
    """

    def __init__(self, frontend: Frontend, started: float) -> None:
        self._frontend, self._started = frontend, started
        self._known = deque[tuple[int, Rates]](maxlen=KEPT)
        self.run = secrets.token_hex(8)

    def load(self) -> pb.Load:
        """Returns the server's load now."""
        return load_of(self._frontend, self._started)

    async def follow(self) -> None:
        """Records rates until cancelled."""
        number, before = 0, self.load()
        due = time.monotonic()
        while True:
            # Fixed due times do not drift; the maximum avoids a burst after the loop was blocked.
            due = max(due + INTERVAL, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            after = self.load()
            found = rates(before, after)
            if found is not None:
                number += 1
                self._known.append((number, found))
                before = after

    def since(self, number: int) -> list[dict[str, Any]]:
        """Returns the rates after this number, oldest first."""
        return [
            {"number": known, "generated": one.generated, "prompt": one.prompt, "ttft": one.ttft}
            for known, one in list(self._known)
            if known > number
        ]
