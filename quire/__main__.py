"""The `quire` command, also as `python -m quire`."""

import sys

from quire.packages import PACKAGES, check_packages


def main() -> None:
    try:
        check_packages(*PACKAGES)
    except ImportError as error:
        sys.exit(f"quire: {error}")
    from rpc.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
