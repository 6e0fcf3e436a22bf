"""Checks Quire's kernels on a CUDA device, and measures them beside the device's limits.

Markdown goes to standard output, progress to standard error. Exits with 1 if a check was wrong or failed.

python -m bench.gpu [--seconds 480] [--json FILE] [--sections ceilings,correctness]
"""

import argparse
import faulthandler
import os
import shutil
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

if not __package__:  # run as a file: modules beside it, such as scheduler.py, would hide Quire's packages
    sys.path[0] = str(Path(__file__).parents[1])

import model  # noqa: F401 - before torch: it sets how OpenMP's threads wait

import torch  # isort: skip

from bench.on_gpu.bench import Bench
from bench.on_gpu.budget import Budget
from bench.on_gpu.device import facts, head
from bench.on_gpu.report import Report, say
from bench.on_gpu.sections import ON_HOST, SECTIONS, run_sections
from bench.on_gpu.sizes import RunSizes, sizes_for
from bench.on_gpu.timing import timer_of

GRACE = 60.0  # seconds beyond the run's time after which a run that hangs is ended


def main() -> int:
    args = arguments().parse_args()
    names = args.sections.split(",") if args.sections else [*(SECTIONS if args.device == "cuda" else ON_HOST)]
    if unknown := [name for name in names if name not in SECTIONS]:
        print(f"--sections names {', '.join(unknown)}; there are {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    if args.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; --device cpu checks the script itself", file=sys.stderr)
        return 2
    if args.json is not None and not args.json.parent.is_dir():
        print(f"--json is {args.json}: no such directory", file=sys.stderr)
        return 2
    device, places = torch.device(args.device), list[Path]()
    sizes = sizes_for(device)
    if args.models:
        if unknown := [name for name in args.models.split(",") if name not in sizes.models]:
            print(f"--models names {', '.join(unknown)}; there are {', '.join(sizes.models)}", file=sys.stderr)
            return 2
        sizes = replace(sizes, models=tuple(args.models.split(",")))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that directories are removed
    watch = threading.Timer(args.seconds + GRACE, cut_off, [places])
    watch.daemon = True
    watch.start()
    try:
        return run(device, sizes, names, args.seconds, args.json, places)
    finally:
        remove(places)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480.0, help="the run's time (default %(default)s); what does "
                        "not fit is named as skipped")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all numbers here too, section by section")
    parser.add_argument("--sections", metavar="NAMES", help=f"some of {','.join(SECTIONS)} (default: all)")
    parser.add_argument("--models", metavar="NAMES", help="models of the engine's section (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help=f"cpu checks the script itself: small sizes, and {', '.join(ON_HOST)} only")  # fmt: skip
    return parser


def run(
    device: torch.device, sizes: RunSizes, names: list[str], seconds: float, path: Path | None, places: list[Path]
) -> int:  # fmt: skip
    """Runs the sections, and prints their report.

    Args:
        device: Device to measure.
        sizes: Sizes of the work.
        names: Sections to run.
        seconds: Time of the run.
        path: JSON file; None writes none.
        places: Receives directories that the caller must remove.

    Returns:
        The exit status.
    """
    report = Report(facts=facts(device), path=path)
    print(head(report.facts), flush=True)
    torch.set_float32_matmul_precision("highest")
    bench = Bench(device, sizes, Budget(seconds), report, timer_of(device), places=places)
    run_sections(bench, names)
    print(report.goals_markdown())
    report.write()
    for line in report.failures:
        print(f"- {line}")
    say(f"done, {bench.budget.left:.0f} s left")
    return 1 if report.failures else 0


def remove(places: list[Path]) -> None:
    for directory in places:
        shutil.rmtree(directory, ignore_errors=True)


def cut_off(places: list[Path]) -> None:
    """Ends a run that hangs, and prints where it hangs. Its tables so far are printed already."""
    faulthandler.dump_traceback()
    remove(places)
    say("the run hangs: it was ended")
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
