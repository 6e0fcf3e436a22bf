"""Prints the hit rates of all eviction policies on traces of requests, by the blocks of cache.

python -m bench.hit_rates TRACE [TRACE ...] [--capacities 300 1000 3000 10000 30000] [--json]

A trace has JSON lines as `quire cache-sim` reads them: requests with "hash_ids". A range of its requests may follow the
path, as `TRACE@0:1000`. `made:NAME` is traffic of `bench.made_traffic`, `made:all` all of it. Hit rates do not depend
on the machine.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.made_traffic import MADE
from cache_manager.policies import POLICIES
from cache_manager.simulation import simulate
from rpc.cli.cache_sim import read_blocks

CAPACITIES = [300, 1000, 3000, 10_000, 30_000]


@dataclass(frozen=True)
class HitRates:
    """Hit rates of the policies on a trace.

    Attributes:
        trace: The trace as it was named.
        requests: Requests of the trace.
        capacity: Blocks of cache.
        rates: Hit rate by policy.
    """

    trace: str
    requests: int
    capacity: int
    rates: dict[str, float]


def read_trace(name: str) -> list[list[int]]:
    """Reads the block ids of a trace's requests, or of a range of them.

    Raises:
        ValueError: The file is no trace, or the range is none.
        OSError: The file cannot be read.
    """
    if name.startswith("made:"):
        return made_traffic(name.removeprefix("made:"))
    path, _, part = name.partition("@")
    requests = list(read_blocks(Path(path)))
    if not part:
        return requests
    start, colon, end = part.partition(":")
    if not colon:
        raise ValueError(f"the range of {name!r} must be START:END")
    return requests[int(start or 0) : int(end or len(requests))]


def made_traffic(name: str) -> list[list[int]]:
    """Makes traffic by its name. Raises ValueError where there is none of this name."""
    if name not in MADE:
        raise ValueError(f"made:{name} is unknown, the names are {', '.join(MADE)}")
    return MADE[name]()


def measure(names: list[str], capacities: list[int]) -> Iterator[HitRates]:
    """Yields the hit rates of each trace with each capacity."""
    for name in names:
        requests = read_trace(name)
        for capacity in capacities:
            rates = {policy: simulate(requests, capacity, make).hit_rate for policy, make in POLICIES.items()}
            yield HitRates(name, len(requests), capacity, rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--capacities", type=int, nargs="+", default=CAPACITIES, help="blocks of cache")
    parser.add_argument("--json", action="store_true", help="a JSON object for each row")
    args = parser.parse_args()
    names = [n for name in args.traces for n in ([f"made:{kind}" for kind in MADE] if name == "made:all" else [name])]
    if not args.json:
        print("| trace | requests | blocks of cache |", " | ".join(POLICIES), "|")
        print("|---|---|---|" + "---|" * len(POLICIES))
    for row in measure(names, args.capacities):
        if args.json:
            print(json.dumps(asdict(row)), flush=True)
        else:
            rates = " | ".join(f"{rate:.4f}" for rate in row.rates.values())
            print(f"| {Path(row.trace).name} | {row.requests:,} | {row.capacity:,} | {rates} |", flush=True)


if __name__ == "__main__":
    main()
