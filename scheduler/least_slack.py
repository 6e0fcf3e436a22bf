"""Deadlines: the request that has to start soonest is admitted first, and none is that can no longer be ready in time.

A request's slack is the time until its deadline less the time that it is predicted to run. Among waiting requests the
order by slack is that by the moment at which each must start at the latest, and such a moment does not change as time
goes by. So it is the place in line (least slack first: Mok, MIT, 1983).

A request whose moment has passed ends with a refusal, before it takes a row from one that can still be ready: under
overload the work of an engine goes to outputs that somebody waits for. Running rows do not give way to others.
"""

import math

from scheduler.policy import FirstCome
from scheduler.request import Request

TICKS = 1024  # of a second, in `order`
ARRIVAL_BITS = 20  # of `order`, below the ticks: keeps requests of one tick apart and in order of arrival
LONGEST = 1e7  # seconds to a deadline, or of a run, as which longer ones count: `order` has 59 bits
NO_DEADLINE = 600.0  # seconds: a request without a deadline comes as though it had this one, but is not refused
MARGIN = 1.25  # times the predicted time, as what starts at the last moment is late where a step takes longer
LEVEL = 10.0  # seconds later to start, for each level of `priority`


class LeastSlack(FirstCome):
    """Requests by the latest moment at which they can start.

    None is passed by others: the first in line has no time to wait for them.
    """

    def __init__(self) -> None:
        super().__init__()

    def order(self, request: Request, arrivals: int, now: float, seconds: float) -> int:
        deadline = NO_DEADLINE if request.deadline is None else min(request.deadline, LONGEST)
        place = math.floor((now + deadline - MARGIN * min(seconds, LONGEST) + request.priority * LEVEL) * TICKS)
        return (place << ARRIVAL_BITS) + arrivals % (1 << ARRIVAL_BITS)

    def patience(self, request: Request, seconds: float) -> float:
        return math.inf if request.deadline is None else max(0.0, request.deadline - MARGIN * seconds)
