"""Writes the pages: python -m docs.pages_of_code FOLDER."""

import sys
from pathlib import Path

from docs.pages_of_code import command_line, configuration, errors, metrics, parameters

PAGES = {
    "command-line": command_line,
    "configuration": configuration,
    "errors": errors,
    "metrics": metrics,
    "parameters": parameters,
}


def main(folder: Path) -> None:
    """Writes every page into the folder, which it makes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in PAGES.items():
        (folder / f"{name}.md").write_text(module.page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
