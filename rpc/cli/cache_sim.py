"""`quire cache-sim`: simulates the prefix cache on a trace of requests."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from cache_manager.policies import POLICIES
from cache_manager.settings import CacheSettings


def cache_sim(
    trace: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='JSON lines, one request each, with "hash_ids": an id for each block of its prompt, as in Mooncake\'s '
            "traces.",
        ),
    ],
    capacity: Annotated[
        int,
        typer.Option(
            min=1,
            help="Blocks kept from one request to the next; the blocks of the request being served come on top.",
        ),
    ],
    policy: Annotated[str, typer.Option(help=f"Eviction policy: {', '.join(POLICIES)}.")] = CacheSettings().eviction,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Replay a trace's prompts, one after the other, against the prefix cache of this version.

    A block counts as hit if it and all blocks before it were cached.
    """
    from cache_manager.simulation import simulate

    if policy not in POLICIES:
        raise typer.BadParameter(f"--policy is {policy!r}, must be one of {', '.join(POLICIES)}")
    try:
        requests = list(read_blocks(trace))
    except (OSError, ValueError) as error:
        typer.echo(f"quire: {error}", err=True)
        raise typer.Exit(1) from None
    with Progress(console=Console(stderr=True), transient=True, disable=as_json) as bar:
        savings = simulate(bar.track(requests, description="requests"), capacity, POLICIES[policy])
    values = {
        "policy": policy,
        "capacity": capacity,
        "requests": savings.requests,
        "blocks": savings.blocks,
        "hit_blocks": savings.hits,
        "hit_rate": savings.hit_rate,
        "evicted_blocks": savings.evicted,
    }
    if as_json:
        print(json.dumps(values))
        return
    print(
        f"{savings.hits:,} of {savings.blocks:,} blocks hit ({100 * savings.hit_rate:.1f} %): policy {policy}, "
        f"{capacity:,} blocks of cache, {savings.requests:,} requests, {savings.evicted:,} blocks evicted"
    )


def read_blocks(trace: Path) -> Iterator[list[int]]:
    """Yields the ids of each request's blocks. Raises ValueError, which names the line, if the file is no trace."""
    with trace.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                ids = json.loads(line)["hash_ids"]
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ValueError(f'{trace}, line {number}: must be an object with "hash_ids"') from None
            if not isinstance(ids, list) or not all(type(i) is int for i in ids):
                raise ValueError(f'{trace}, line {number}: "hash_ids" must be a list of whole numbers')
            yield ids
