"""Floor and predicted time of a recorded step on a device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.gpu_ledger.cases import Device, LedgerModel, Regime
from bench.gpu_ledger.costs import ATTENTION, MIXTURE, PRODUCT, ROWS, SAMPLER, SUM
from bench.gpu_ledger.published import LEAST, Line, Rates
from bench.gpu_ledger.recording import Launch
from bench.gpu_ledger.steps import LedgerStep
from bench.on_gpu.models import Costs

FIRST_OF_MIXTURE = "choose_experts"
"""The launch that the start of a mixture is counted with."""
OWN_LAUNCHES = 2
"""Launches of a mixture that are counted as what they are: the router's product, and the gate."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Least seconds of a step: weights and KV once, operations of products, bytes between devices.

    Attributes:
        memory: Seconds of weights and KV.
        multiply: Seconds of products.
        link: Seconds of sums of ranks.
    """

    memory: float
    multiply: float
    link: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.multiply, self.link)


def held_bytes(model: LedgerModel, regime: Regime) -> float:
    """Returns the bytes of weights and KV that a device holds."""
    costs = Costs.of(dict(model.fields))
    return (costs.file + regime.keys * costs.token) / model.ranks


def floor_of(step: LedgerStep, device: Device) -> Floor:
    return Floor(
        step.total(lambda work: work.weights + work.kv) / device.memory,
        step.total(lambda work: work.operations) / device.multiply,
        step.total(lambda work: work.linked) / device.link,
    )


def device_seconds(step: LedgerStep, regime: Regime, device: Device, rates: Rates) -> float:
    """Returns the predicted seconds of the device: those of all launches, one after the other."""
    return sum(seconds_by_kind(step, regime, device, rates).values())


def seconds_by_kind(step: LedgerStep, regime: Regime, device: Device, rates: Rates) -> dict[str, float]:
    """Returns the predicted seconds of the device by kind of launch."""
    found = dict.fromkeys(KINDS, 0.0)
    for launch, count in step.launches.items():
        if not launch.empty:
            found[launch.work.kind] += count * _seconds(launch, regime, device, rates)
    return found


def launching_seconds(step: LedgerStep, triton: float, torch: float) -> float:
    """Returns the host's seconds, if each launch takes it as long as measured, and a graph none."""
    return sum(
        count * (triton if launch.by_triton else torch)
        for launch, count in step.launches.items()
        if not launch.recorded and launch.work.kind != SUM
    )


def _seconds(launch: Launch, regime: Regime, device: Device, rates: Rates) -> float:
    return KINDS[launch.work.kind](launch, regime, device, rates)


def _product(launch: Launch, _: Regime, device: Device, rates: Rates) -> float:
    reading = launch.work.bytes / device.memory / rates.product_memory
    return max(LEAST, reading, launch.work.operations / device.multiply / rates.product_multiply)


def _attention(launch: Launch, regime: Regime, device: Device, rates: Rates) -> float:
    work = launch.work
    if not work.tiles:  # a launch without pieces, or the joining, which is measured with the pieces
        return 0.0 if regime.is_decode else LEAST
    if regime.is_decode:
        return rates.decode.start + work.kv / device.memory / rates.decode.memory
    return rates.prefill.start + work.operations / device.multiply / rates.prefill.multiply


def _mixture(launch: Launch, _: Regime, device: Device, rates: Rates) -> float:
    line: Line = rates.mixture
    start = line.start - OWN_LAUNCHES * LEAST if launch.name == FIRST_OF_MIXTURE else 0.0
    work = launch.work
    return start + work.weights / device.memory / line.memory + work.operations / device.multiply / line.multiply


def _rows(launch: Launch, _: Regime, device: Device, rates: Rates) -> float:
    return max(LEAST, launch.work.bytes / device.memory / rates.rows.get(launch.name, rates.copy))


def _sampler(launch: Launch, _: Regime, device: Device, rates: Rates) -> float:
    return max(LEAST, launch.work.bytes / device.memory / rates.sampler)


def _sum(launch: Launch, _: Regime, device: Device, __: Rates) -> float:
    return launch.work.linked / device.link


KINDS: Mapping[str, Callable[[Launch, Regime, Device, Rates], float]] = {
    PRODUCT: _product,
    ATTENTION: _attention,
    MIXTURE: _mixture,
    ROWS: _rows,
    SAMPLER: _sampler,
    SUM: _sum,
}
