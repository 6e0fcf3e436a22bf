"""Measures the host's processor time for steps with a fake driver, as a graph and launch by launch.

What runs is the back end's own Python: the plan of attention and its packing, torch's dispatch of shapes, and Triton's
launches up to the driver. The device's driver, the scheduler and the packing of the batch are not in it.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu_ledger.cases import LEDGER, MEASURED, REGIMES, LedgerModel, Regime
from bench.gpu_ledger.costs import Work
from bench.gpu_ledger.fake_driver import fake_driver
from bench.gpu_ledger.published import steps
from bench.gpu_ledger.steps import CountedCollective, LedgerEngine, shape_of_step
from model.parallel.shard import Shard

DATA = Path(__file__).parents[1] / "results/gpu_ledger/host.json"
TRIES = 9


@dataclass(frozen=True, slots=True)
class HostTime:
    """Processor seconds of the host's thread for a step.

    Attributes:
        engine: As the engine runs it: with graphs up to 2,048 tokens.
        launched: Launch by launch.
    """

    engine: float
    launched: float


def measured_cases() -> Iterator[tuple[LedgerModel, list[Regime]]]:
    """Yields models with the regimes of the ledger and of the measured steps."""
    for model in dict.fromkeys((*LEDGER, *MEASURED.values())):
        regimes = REGIMES if model in LEDGER else ()
        yield model, [*regimes, *(one.regime for one in steps() if one.model is model and one.regime not in regimes)]


def measure() -> dict[str, HostTime]:
    """Returns the least time of some tries, by `case_of`."""
    found = {}
    for model, regimes in measured_cases():
        with fake_driver(), torch.inference_mode():
            collective = CountedCollective(Shard(0, model.ranks), _uncounted) if model.ranks > 1 else None
            graphs, launched = (
                LedgerEngine.of(model, model.layers, recorder, collective) for recorder in (_once, None)
            )
            for regime in regimes:
                found[case_of(model, regime)] = HostTime(_least(graphs, regime), _least(launched, regime))
    return found


def case_of(model: LedgerModel, regime: Regime) -> str:
    return f"{model.name}: {regime}"


def write(found: dict[str, HostTime], processor: str) -> None:
    DATA.parent.mkdir(exist_ok=True)
    cases = {name: [round(1e6 * one.engine), round(1e6 * one.launched)] for name, one in found.items()}
    columns = ["microseconds as the engine runs", "microseconds launch by launch"]
    content: dict[str, Any] = {"processor": processor, "columns": columns, "cases": cases}
    DATA.write_text(json.dumps(content, indent=1) + "\n")


def read() -> tuple[str, dict[str, HostTime]]:
    """Returns the processor of the last measurement, and its times."""
    content = json.loads(DATA.read_text())
    cases: dict[str, tuple[int, int]] = content["cases"]
    return content["processor"], {name: HostTime(1e-6 * own, 1e-6 * each) for name, (own, each) in cases.items()}


def _least(engine: LedgerEngine, regime: Regime) -> float:
    shape = shape_of_step(regime)
    engine.run(regime, shape)  # compiles
    taken = []
    for _ in range(TRIES):
        began = time.thread_time()  # a busy machine does not count
        engine.run(regime, shape)
        taken.append(time.thread_time() - began)
    return min(taken)


def _uncounted(_: str, __: Work) -> None:
    """Counts no exchange."""


def _once(work: Callable[[], object]) -> Callable[[], object]:
    """Records work as a graph whose replay costs nothing; the first one computes shapes."""
    done = False

    def replay() -> None:
        nonlocal done
        if not done:
            work()
            done = True

    return replay
