"""The `quire` command, also as `python -m quire`."""

import sys

from quire.packages import PACKAGES, check_packages


def main() -> None:
    """Runs the command line, after a check that other modules hide none of Quire's packages."""
    try:
        check_packages(*PACKAGES)
    except ImportError as error:
        sys.exit(f"quire: {error}")
    from rpc.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
