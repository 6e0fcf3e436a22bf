"""The ledger's tables as Markdown."""

import statistics
from collections.abc import Iterable, Sequence

from bench.gpu_ledger import code, host, published
from bench.gpu_ledger.cases import H100, H200, LEDGER, REGIMES, LedgerModel, Regime
from bench.gpu_ledger.costs import ATTENTION, MIXTURE, PRODUCT, ROWS, SAMPLER
from bench.gpu_ledger.host import HostTime
from bench.gpu_ledger.prediction import device_seconds, floor_of, held_bytes, seconds_by_kind
from bench.gpu_ledger.published import MeasuredStep
from bench.gpu_ledger.steps import LedgerStep, step_of

PARTS = (PRODUCT, ATTENTION, MIXTURE, ROWS, SAMPLER)
NOT_DIVIDED = "not predicted"


def tables() -> dict[str, str]:
    """Returns all tables by name."""
    processor, times = host.read()
    return {
        "steps": "\n\n".join(_ledger(model, times) for model in LEDGER),
        "parts": _parts(),
        "measured": _measured(published.steps(), times),
        "rates": _rates(),
        "code": _code(),
        "host": f"The host is: {processor}.",
    }


def _ledger(model: LedgerModel, times: dict[str, HostTime]) -> str:
    """Returns the rows of a model."""
    head = (
        model.name, "launches, of them outside a graph", "GB: weights, KV, other", "TFLOP", "floor ms", "device ms",
        "host ms", "step ms", "of the floor",
    )  # fmt: skip
    return _table(head, (_ledger_row(model, regime, step_of(model, regime), times) for regime in REGIMES))


def _ledger_row(model: LedgerModel, regime: Regime, step: LedgerStep, times: dict[str, HostTime]) -> list[str]:
    floor = floor_of(step, H100)
    limits = {"memory": floor.memory, "products": floor.multiply, "NVLink": floor.link}
    outside = sum(count for launch, count in step.launches.items() if not launch.recorded)
    sizes = [step.total(of) for of in (lambda work: work.weights, lambda work: work.kv, lambda work: work.activations)]
    work = [", ".join(f"{size / 1e9:.2f}" for size in sizes), f"{step.total(lambda work: work.operations) / 1e12:.2f}"]
    least = f"{_ms(floor.seconds)} {max(limits, key=limits.__getitem__)}"
    launches = f"{step.count:,}, {outside:,}"
    taken = times[host.case_of(model, regime)]
    hosts = f"{_ms(taken.launched)} → {_ms(taken.engine)}"
    if model.ranks > 1:  # no exchange of ranks was ever timed
        return [str(regime), launches, *work, least, "", hosts, NOT_DIVIDED, ""]
    device = device_seconds(step, regime, H100, published.rates())
    row = [str(regime), launches, *work, least, _ms(device), hosts]
    if (held := held_bytes(model, regime)) > H100.capacity:
        return [*row, f"does not fit: {held / 1e9:.0f} GB", ""]
    before, after = (max(device, seconds) for seconds in (taken.launched, taken.engine))
    return [*row, f"{_ms(before)} → {_ms(after)}", f"{floor.seconds / before:.0%} → {floor.seconds / after:.0%}"]


def _parts() -> str:
    """Returns the predicted time of the device by kind of launch."""
    head = ("device ms, H100", *PARTS)
    rows = []
    for model in (one for one in LEDGER if one.ranks == 1):
        for regime in REGIMES:
            found = seconds_by_kind(step_of(model, regime), regime, H100, published.rates())
            rows.append([f"{model.name}: {regime}", *(_ms(found[kind]) for kind in PARTS)])
    return _table(head, rows)


def _measured(measured: Sequence[MeasuredStep], times: dict[str, HostTime]) -> str:
    """Returns predictions for an H200 beside its measured steps."""
    head = (
        "H200", "floor ms", "device ms", "host ms", "predicted ms", "measured ms", "error", "its host ms, measured"
    )  # fmt: skip
    rows, errors = list[list[str]](), list[float]()
    for one in measured:
        step, taken = step_of(one.model, one.regime), times[host.case_of(one.model, one.regime)]
        device = device_seconds(step, one.regime, H200, published.rates())
        predicted = max(device, taken.engine)
        errors.append(predicted / one.seconds - 1)
        rows.append(
            [
                one.case, _ms(floor_of(step, H200).seconds), _ms(device), _ms(taken.engine), _ms(predicted),
                _ms(one.seconds), f"{errors[-1]:+.0%}", _ms(one.host) if one.host else "",
            ]
        )  # fmt: skip
    middle, most = statistics.median(map(abs, errors)), max(errors, key=abs)
    said = f"The median of the errors, without their signs, is {middle:.0%}; the largest is {most:+.0%}."
    return f"{_table(head, rows)}\n\n{said}"


def _rates() -> str:
    found = published.rates()
    head = ("part", "start µs", "of the memory's rate", "of the rate of products")
    shares = [
        ("products", 0.0, found.product_memory, found.product_multiply),
        ("attention of decodes, a layer", found.decode.start, found.decode.memory, None),
        ("attention of prompts, a layer", found.prefill.start, None, found.prefill.multiply),
        ("mixture of experts, a layer", found.mixture.start, found.mixture.memory, found.mixture.multiply),
        *((f"`{name}`", 0.0, share, None) for name, share in found.rows.items()),
        ("torch's other operations", 0.0, found.copy, None),
        ("sampler", 0.0, found.sampler, None),
    ]
    rows = [
        [name, f"{start * 1e6:.1f}" if start else "", *("" if one is None else f"{one:.0%}" for one in each)]
        for name, start, *each in shares
    ]
    return f"{_table(head, rows)}\n\nNo launch takes less than {published.LEAST * 1e6:.1f} µs."


def _code() -> str:
    version, kernels = code.read()
    head = (
        f"Triton {version}, compute capability 9.0", "warps", "registers", "stack B", "shared B", "instructions a tile",
        "bytes a tile", "kFLOP a tile", "ns: memory", "ns: issue", "ns: products",
    )  # fmt: skip
    rows = [
        [
            one.kernel, str(one.warps), str(one.registers), str(one.stack), f"{one.shared:,}", f"{one.instructions:,}",
            f"{one.bytes:,}", f"{one.operations / 1e3:,.0f}",
            *(f"{1e9 * each:,.0f}" for each in (one.reading(H100), one.issuing, one.multiplying(H100))),
        ]
        for one in kernels
    ]  # fmt: skip
    return _table(head, rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" if line[0] != "---" else "|---" * len(head) + "|" for line in lines)
