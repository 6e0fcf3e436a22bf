"""What a server did in each of the last seconds, for charts that begin before anybody looks."""

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
    """started: when the server was, on the monotonic clock. `follow` it on the frontend's loop. run: which one this is;
    that of a server started anew is another, and its numbers say nothing of these.
    """

    def __init__(self, frontend: Frontend, started: float) -> None:
        self._frontend, self._started = frontend, started
        self._known = deque[tuple[int, Rates]](maxlen=KEPT)
        self.run = secrets.token_hex(8)

    def load(self) -> pb.Load:
        return load_of(self._frontend, self._started)

    async def follow(self) -> None:
        """Until it is cancelled."""
        number, before = 0, self.load()
        due = time.monotonic()
        while True:
            # No drift, and no burst after the loop was held up.
            due = max(due + INTERVAL, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            after = self.load()
            found = rates(before, after)
            if found is not None:
                number += 1
                self._known.append((number, found))
                before = after

    def since(self, number: int) -> list[dict[str, Any]]:
        """Those after this one, oldest first; the first is 1."""
        return [
            {"number": known, "generated": one.generated, "prompt": one.prompt, "ttft": one.ttft}
            for known, one in list(self._known)
            if known > number
        ]
