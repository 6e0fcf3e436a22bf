"""Draws a snapshot as a picture of a given size. Pure: no clock, no server, no terminal."""

from collections.abc import Sequence

from quire.v1 import admin_service_pb2 as pb
from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rpc.terminal.cells import folded, parts, spark
from rpc.terminal.snapshot import Snapshot, States

COLOURS = {"held": "green", "cached": "blue", "free": "bright_black", "set aside": "bold red"}
STATES = {
    pb.REPLICA_STATE_STARTING: "yellow",
    pb.REPLICA_STATE_SERVING: "green",
    pb.REPLICA_STATE_DRAINED: "yellow",
    pb.REPLICA_STATE_ISOLATED: "red",
}
LEAST_MAP, MOST_MAP = 2, 12  # lines of the page map of an engine
LEAST_LIST, MOST_LIST = 3, 12  # lines of requests and tenants
CHART = 90  # columns at most
KEYS = ("q", "bold"), " quits   "
WIDE = 100  # columns from which places are shown, and requests stand beside tenants
MOST_COLUMN = 60


def picture(snapshot: Snapshot, width: int, height: int, live: bool = True) -> RenderableType:
    """Draws a snapshot.

    Args:
        snapshot: State of the server.
        width: Columns of the picture.
        height: Lines of the picture. It may need more; a terminal then shows its upper part.
        live: Whether q ends the picture, which its last line then says.
    """
    load = snapshot.load
    if load is None:
        return Panel(Text(snapshot.trouble or "connecting ..."), title=_title(snapshot), border_style="yellow")
    engines = max(1, len(load.replicas))
    left = height - (8 + bool(snapshot.trouble)) - (engines + 3) - 1
    listed = max(LEAST_LIST, min(MOST_LIST, max(len(snapshot.requests.requests), len(load.tenants)), left // 3))
    beside = 3 if width >= WIDE else 6 + min(listed, len(load.tenants))
    lines = (left - listed - beside) // engines - 3
    lines = max(LEAST_MAP, min(MOST_MAP, lines))
    return Group(
        _summary(snapshot, load, width),
        _engines(load, width),
        *(_page_map(number, snapshot.pages[number], width, lines) for number in sorted(snapshot.pages)),
        _lists(snapshot, load, width, listed),
        Text.assemble(" ", *(KEYS if live else ()), *_legend(), style="bright_black", end="" if live else "\n"),
    )


def _title(snapshot: Snapshot) -> Text:
    info = snapshot.info
    if info is None:
        return Text(f"quire top  {snapshot.server}")
    return Text(f"{info.model}  {info.architecture}, {info.dtype} on {info.device}  {snapshot.server}")


def _summary(snapshot: Snapshot, load: pb.Load, width: int) -> RenderableType:
    now, known = snapshot.now, snapshot.rates
    chart = max(0, min(CHART, width - 50))
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=11)
    table.add_column(justify="right", min_width=16)
    table.add_column(min_width=chart)
    table.add_column(style="bright_black")

    def line(name: str, value: str, values: Sequence[float | None], colour: str, note: str = "") -> None:
        table.add_row(name, Text(value, "bold"), Text(spark(values, chart), colour, no_wrap=True), note)

    of = "" if now is None or now.cached is None else f"{now.cached:.0%} cached"
    generated = [None if one is None else one.generated for one in known]
    prompt = [None if one is None else one.prompt for one in known]
    firsts = [None if one is None else one.ttft for one in known]
    line("generated", "-" if now is None else f"{now.generated:,.0f} tokens/s", generated, "green")
    line("prompt", "-" if now is None else f"{now.prompt:,.0f} tokens/s", prompt, "cyan", of)
    line("first token", "-" if now is None or now.ttft is None else duration(now.ttft), firsts, "magenta")
    waiting = sum(tenant.waiting_count for tenant in load.tenants)
    counted = f"{load.request_count:,} live, {waiting:,} waiting, {load.ended_requests_total:,} have ended"
    rows: list[RenderableType] = [table, Text.assemble("requests     ", (counted, "bold"))]
    up = f"up {duration(load.uptime.ToNanoseconds() / 1e9)}; {load.generation_tokens_total:,} tokens generated"
    rows.append(Text(up, "bright_black"))
    if snapshot.trouble:
        rows.append(Text(f"{snapshot.trouble}; trying again", "bold red", no_wrap=True, overflow="ellipsis"))
    border = "red" if snapshot.trouble else "bright_black"
    return Panel(Group(*rows), title=_title(snapshot), title_align="left", border_style=border)


def _engines(load: pb.Load, width: int) -> RenderableType:
    table = _table(f"{len(load.replicas)} engine{'s' if len(load.replicas) != 1 else ''}")
    names = ("engine", "epoch", "running", "waiting", "state", "pages", *(["place"] if width >= WIDE else []))
    rows = []
    for one in load.replicas:
        state = Text(pb.ReplicaState.Name(one.state).removeprefix("REPLICA_STATE_").lower(), STATES.get(one.state, ""))
        numbers = [Text(f"{number:,}") for number in (one.number, one.epoch, one.running, one.waiting)]
        rows.append([*numbers, state, _bar(one, width), *([Text(one.place)] if width >= WIDE else [])])
    _fill(table, names, rows, elastic=names[-1], right=names[:4])
    return table


def _bar(one: pb.Replica, width: int) -> Text:
    """Draws held, cached and free pages as a bar with their counts."""
    whole, room = max(1, one.pages_total), max(4, min(30, width - 90))
    held, cached = parts((one.pages_used / whole, one.pages_cached / whole), room)
    free = room - held - cached
    counts = f" {one.pages_used:,} held, {one.pages_cached:,} cached of {one.pages_total:,}"
    bars = ("█" * held, COLOURS["held"]), ("▒" * cached, COLOURS["cached"]), ("·" * free, COLOURS["free"])
    return Text.assemble(*bars, counts, no_wrap=True)


def _page_map(number: int, states: States, width: int, lines: int) -> RenderableType:
    columns = max(8, width - 4)
    each, cells = folded(states, columns * lines)
    drawn = Text()
    for start in range(0, len(cells), columns):
        for cell in cells[start : start + columns]:
            drawn.append(cell.glyph, COLOURS[cell.kind])
        drawn.append("\n" if start + columns < len(cells) else "")
    title = f"KV pages of engine {number}: {len(states):,}" + (f", {each} in a cell" if each > 1 else "")
    return Panel(drawn, title=title, title_align="left", border_style="bright_black")


def _lists(snapshot: Snapshot, load: pb.Load, width: int, most: int) -> RenderableType:
    tenants, names = _table("tenants"), ("tenant", "live", "waiting", "tokens")
    rows = [
        [Text(one.tenant), *(Text(f"{count:,}") for count in (one.request_count, one.waiting_count, one.tokens))]
        for one in load.tenants[:most]
    ]
    _fill(tenants, names, rows, elastic="tenant", right=names[1:])
    requests = _table(f"oldest of {snapshot.requests.total_count:,} requests")
    names_of_requests = ("request", "tenant", "state", "engine", "age", "prompt", "output")
    rows = [_request(live) for live in snapshot.requests.requests[:most]]
    _fill(requests, names_of_requests, rows, elastic="request", right=names_of_requests[3:])
    if width < WIDE:
        return Group(tenants, requests)
    both = Table.grid(expand=True, padding=(0, 2))
    both.add_column(ratio=1)
    both.add_column(ratio=2)
    both.add_row(tenants, requests)
    return both


def _request(live: pb.LiveRequest) -> list[Text]:
    # As Text: clients choose request ids, whose brackets must not act as markup.
    state = pb.RequestState.Name(live.state).removeprefix("REQUEST_STATE_").lower()
    engine = str(live.replica) if live.HasField("replica") else "-"
    age = duration(live.age.ToNanoseconds() / 1e9)
    figures = live.request_id, live.tenant, state, engine, age, f"{live.prompt_tokens:,}", f"{live.completion_tokens:,}"
    return [Text(figure) for figure in figures]


def _table(title: str) -> Table:
    return Table(
        title=Text(title, "bright_black"), title_justify="left", box=box.SIMPLE_HEAD, expand=True, padding=(0, 1),
        show_edge=False, header_style="bright_black",
    )  # fmt: skip


def _fill(
    table: Table, names: Sequence[str], rows: Sequence[Sequence[Text]], elastic: str, right: Sequence[str]
) -> None:
    """Fills a table.

    Args:
        table: An empty table.
        names: Headings.
        rows: Values of each row.
        elastic: Column that gets the remaining width, and is cut if there is little.
        right: Columns of figures, aligned to the right.
    """
    for place, name in enumerate(names):
        widest = max([len(name), *(row[place].cell_len for row in rows)])
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if name == elastic else None,
            min_width=None if name == elastic else min(widest, MOST_COLUMN),
        )
    for row in rows:
        table.add_row(*row)


def _legend() -> list[tuple[str, str]]:
    shown = {"held": "█ held", "cached": "⠿ cached", "free": "· free"}
    return [(f"{text}   ", COLOURS[kind]) for kind, text in shown.items()]


def duration(seconds: float) -> str:
    """Returns a duration in units for people: "12.3 ms", "4.0 s", "3 min 5 s", "2 h 1 min"."""
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
