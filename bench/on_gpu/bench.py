"""What all sections of a run share."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.on_gpu.budget import Budget
from bench.on_gpu.report import Report
from bench.on_gpu.sizes import Sizes
from bench.on_gpu.timing import Timer


@dataclass(frozen=True, slots=True)
class Ceilings:
    """copy: bytes read and written a second by a copy within the device. read: bytes a second. multiply: operations a
    second of bfloat16 products. Each is the best that was seen.
    """

    copy: float
    read: float
    multiply: float

    @property
    def memory(self) -> float:
        """What no step that reads can be faster than."""
        return max(self.copy, self.read)


@dataclass(slots=True)
class Bench:
    """ceilings: None until they have been measured, or where they could not be. checkpoints: by name of the model,
    those that have been written. places: directories to be removed at the end.
    """

    device: torch.device
    sizes: Sizes
    budget: Budget
    report: Report
    timer: Timer
    ceilings: Ceilings | None = None
    checkpoints: dict[str, Path] = field(default_factory=dict)
    places: list[Path] = field(default_factory=list)
