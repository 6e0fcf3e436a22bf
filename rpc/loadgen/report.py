"""Shows a load's figures as tables in a terminal."""

from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

LATENCIES = {
    "TTFT": "ttft_ms",
    "TPOT": "tpot_ms",
    "ITL": "itl_ms",
    "E2E": "e2e_ms",
}
COUNTS = {
    "Requests that ended well": "ok",
    "Failed": "failed",
    "With fewer or more tokens than asked": "short",
    "Interrupted": "interrupted",
    "Seconds": "seconds",
    "Requests/s": "requests_per_second",
    "Input tokens/s": "input_tokens_per_second",
    "Output tokens/s": "output_tokens_per_second",
    "Messages": "messages",
    "Input tokens": "input_tokens",
    "Output tokens": "output_tokens",
}


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns name and value of all figures but latencies."""
    shown = [(label, f"{result[key]:,}") for label, key in COUNTS.items()]
    if result["goodput"] is not None:
        shown.append(("Goodput", f"{result['goodput']:.1%}, {result['goodput_per_second']:,} requests/s"))
    if result["prompt_lengths"] is not None:
        shown.append(("Tokens of a prompt", _lengths(**result["prompt_lengths"])))
    if result["cached_share"] is not None:
        shown.append(("Input tokens from the prefix cache", f"{result['cached_share']:.1%}"))
    own = result["generator"]
    shown.append(
        (
            "Generator",
            f"{own['loop_busy']:.0%} busy, {own['cpu_cores']:.2f} cores, {own['cpu_us_per_token']:.0f} us/token",
        )
    )
    late = [f"{what} {own[key]['p99']:.1f} ms" for what, key in LAGS.items() if own[key]]
    return [*shown, ("Generator late, p99", ", ".join(late) or "-")]


def _lengths(asked: dict[str, float], counted: dict[str, float] | None) -> str:
    def spread(tokens: dict[str, float]) -> str:
        ends = f" ({tokens['min']:,} to {tokens['max']:,})" if tokens["min"] != tokens["max"] else ""
        return f"{tokens['mean']:,g}{ends}"

    if counted == asked:
        return spread(asked)
    return f"{spread(counted) if counted else 'not counted by the server'}, asked for {spread(asked)}"


LAGS = {"sending": "sent_late_ms", "event loop": "loop_late_ms"}


def latency_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns a heading, then a row for each measured latency, in milliseconds."""
    known = {label: result[key] for label, key in LATENCIES.items() if result[key]}
    names = list(next(iter(known.values()))) if known else []
    return [
        ("ms", *names),
        *((label, *(f"{value:,.1f}" for value in found.values())) for label, found in known.items()),
    ]


def show(result: dict[str, Any], title: str, console: Console) -> None:
    """Prints the tables, warnings and errors."""
    figures = Table(title=title, show_header=False)
    figures.add_column()
    figures.add_column(justify="right")
    for row in rows(result):
        figures.add_row(*row)
    head, *latencies = latency_rows(result)
    times = Table()
    for name in head:
        times.add_column(name, justify="left" if name == "ms" else "right")
    for cells in latencies:
        times.add_row(*cells)
    warnings = [*result["warnings"], *result["generator"]["warnings"]]
    notes = [Text(f"warning: {warning}", style="yellow") for warning in warnings]
    notes += [
        Text(f"{error['count']} x {code}: {error['message']}", style="red") for code, error in result["errors"].items()
    ]
    console.print(Group(figures, *([times] if latencies else []), *notes))
