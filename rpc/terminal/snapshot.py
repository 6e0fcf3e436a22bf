"""A server at one moment, as `quire top` draws it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from quire.v1 import admin_service_pb2 as pb

from rpc.observe.rates import Rates

States = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """server: HOST:PORT of its admin port. info, load: None where it has not been reached yet. pages: [pages] of
    pb.PageState by engine, of those that answered. rates: oldest first; None where the server was away. trouble: why
    the rest is not of this moment; "" where it is.
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
        """The newest ones."""
        return self.rates[-1] if self.rates else None
