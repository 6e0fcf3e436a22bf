"""State of a server at one moment, for `quire top`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from quire.v1 import admin_service_pb2 as pb

from rpc.observe.rates import Rates

States = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """State of a server at one moment.

    Attributes:
        server: HOST:PORT of its admin port.
        info: The server's description; None before the first response.
        load: Its load; None before the first response.
        pages: Engine to [pages] uint8 of pb.PageState, for the engines that answered.
        requests: The oldest live requests.
        rates: Rates by interval, oldest first; None while the server was away.
        trouble: Reason why the other fields are out of date; "" if they are current.
    """

    server: str
    info: pb.GetServerInfoResponse | None = None
    load: pb.Load | None = None
    pages: Mapping[int, States] = field(default_factory=dict)
    requests: pb.ListRequestsResponse = field(default_factory=pb.ListRequestsResponse)
    rates: tuple[Rates | None, ...] = ()
    trouble: str = ""

    @property
    def now(self) -> Rates | None:
        """The newest rates."""
        return self.rates[-1] if self.rates else None
