"""Makes swapping pay, whatever a machine measures."""

import pytest

from scheduler.costs import SwapCost


def always_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the cost of a swapped page unknown, so that the scheduler swaps: measured, it differs between machines."""
    monkeypatch.setattr(SwapCost, "observe", lambda self, pages, seconds: None)
