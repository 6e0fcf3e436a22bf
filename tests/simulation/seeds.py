"""Many small deployments under drawn faults, each held to its laws: python -m tests.simulation.seeds --help.

A seed stands for one deployment with its faults and clients (`drawn.py`). Nothing else is drawn, so it repeats.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterable

from scheduler.events import EndReason
from tests.scheduler.executor import LawBroken
from tests.simulation.drawn import draw
from tests.simulation.laws import StrictLedger, check_end

TWICE = 10  # each seed of this number runs twice, and must give the same digest


def check(seed: int) -> Counter[str]:
    """Runs a seed under the laws. Returns how often things happened.

    Raises:
        LawBroken: A law does not hold, or the code under it failed. The message has the command that repeats it.
    """
    try:
        happened, digest = _run(seed)
        if seed % TWICE == 0 and _run(seed)[1] != digest:
            raise LawBroken("it is served in another way the second time")
    except Exception as error:
        raise LawBroken(f"seed {seed}: {error!r}; repeat it: python -m tests.simulation.seeds {seed}") from error
    return happened


def _run(seed: int) -> tuple[Counter[str], str]:
    drawn = draw(seed)
    ledger = StrictLedger(drawn)
    run = drawn.cluster(ledger)
    serving = run.run()
    check_end(drawn, run, ledger, serving)
    happened = Counter(reason.value for reason in ledger.reasons.values())
    happened["moved"], happened["preempted"] = len(ledger.moved), serving.preemptions
    happened["left"], happened["prefix hits"] = len(ledger.cut), serving.hits
    happened["grown"] = any(row[1] > drawn.deployment.replicas for row in run.samples)
    happened["cut off"] = sum(
        client.enough is not None and ledger.reasons[number] is EndReason.FINISHED and number not in ledger.cut
        for number, client in enumerate(drawn.clients)
    )
    return happened, serving.digest()


def check_all(seeds: Iterable[int]) -> Counter[str]:
    """Runs seeds as `check`. Returns the sums."""
    happened = Counter[str]()
    for seed in seeds:
        happened.update(check(seed))
    return happened


def main() -> None:
    parser = argparse.ArgumentParser(description="Small deployments under drawn faults, each held to its laws.")
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="number of seeds from it on (%(default)s)")
    arguments = parser.parse_args()
    started = time.process_time()
    happened = check_all(range(arguments.first, arguments.first + arguments.count))
    seconds = time.process_time() - started
    print(f"the laws hold: {arguments.count:,} seeds, {seconds:.1f} s, {1e3 * seconds / arguments.count:.1f} ms each")
    print(", ".join(f"{name} {count:,}" for name, count in sorted(happened.items())))


if __name__ == "__main__":
    main()
