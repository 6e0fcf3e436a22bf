"""Places of the ledger's tables in a page of the docs."""

import platform
from collections.abc import Mapping
from pathlib import Path


def filled(page: str, made: Mapping[str, str]) -> str:
    """Returns the page with these tables. Raises ValueError where it lacks the place of one."""
    for name, table in made.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if (page.count(begin), page.count(end)) != (1, 1):
            raise ValueError(f"the page has no single place for the table {name}, between {begin} and {end}")
        before, rest = page.split(begin)
        page = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    return page


def processor() -> str:
    """Returns the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
