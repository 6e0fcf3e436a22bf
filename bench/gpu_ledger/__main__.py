"""Predicts steps on an H100, without one: launches, bytes, operations, floor and time, as docs/gpu.md has them.

Prints the tables. The host's times and the compiled code are read from bench/results/gpu_ledger.

python -m bench.gpu_ledger [--measure-host] [--compile] [--write]
"""

import argparse
import os
import platform
from pathlib import Path

from bench.gpu_ledger import code, host, page
from bench.gpu_ledger.tables import tables

PAGE = Path(__file__).parents[2] / "docs/gpu.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure-host", action="store_true", help="measures the host anew, with a fake driver")
    parser.add_argument("--compile", action="store_true", help="compiles the kernels anew, and reads their code")
    parser.add_argument("--write", action="store_true", help=f"writes the tables into {PAGE.name}")
    args = parser.parse_args()
    if args.measure_host:
        host.write(host.measure(), f"{os.cpu_count()} cores of {page.processor()}, Python {platform.python_version()}")
    if args.compile:
        code.write(code.compiled())
    if args.write:
        PAGE.write_text(page.filled(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")
        return
    print("\n\n".join(tables().values()))


if __name__ == "__main__":
    main()
