"""State that all sections of a run share."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.on_gpu.budget import Budget
from bench.on_gpu.report import Report
from bench.on_gpu.sizes import RunSizes
from bench.on_gpu.timing import Timer


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Limits of the device; each is the best measurement.

    Attributes:
        copy: Bytes read and written a second by a copy within the device.
        read: Bytes read a second.
        multiply: Operations a second of bfloat16 products.
    """

    copy: float
    read: float
    multiply: float

    @property
    def memory(self) -> float:
        """Bytes a second, by the faster of reading and copying."""
        return max(self.copy, self.read)


@dataclass(slots=True)
class Bench:
    """A run.

    Attributes:
        device: Device to measure.
        sizes: Sizes of the work.
        budget: Time of the run.
        report: Tables and goals.
        timer: Timer of the device.
        ceilings: Limits of the device; None if they are not measured.
        checkpoints: Name of a model, to its checkpoint written in this run.
        places: Directories to remove at the end.
    """

    device: torch.device
    sizes: RunSizes
    budget: Budget
    report: Report
    timer: Timer
    ceilings: Ceilings | None = None
    checkpoints: dict[str, Path] = field(default_factory=dict)
    places: list[Path] = field(default_factory=list)
