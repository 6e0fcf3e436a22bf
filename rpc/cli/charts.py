"""Charts of the command line: HTML files that matplotlib draws."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from rpc.distribution import how_to_install

HtmlFile = Annotated[
    Path | None, typer.Option("--html", dir_okay=False, help="HTML file for figures and charts. Needs matplotlib.")
]


def check_charts(html: Path | None) -> None:
    """Raises ValueError where a file is asked for and matplotlib is not installed."""
    if html is not None and find_spec("matplotlib") is None:
        raise ValueError(f"--html needs matplotlib: {how_to_install('plots')}")
