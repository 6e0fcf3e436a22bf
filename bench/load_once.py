"""Loads a model once and prints the time and the memory of it. `bench.load_weights` starts it in fresh processes.

python -m bench.load_once LOCATION [QUANTIZATION]
"""

import gc
import json
import sys
from contextlib import suppress
from pathlib import Path
from time import perf_counter

from bench.loaded import load
from rpc.paths import demo_directory


def memory(process: str = "self") -> dict[str, int]:
    """Returns bytes of memory of a process by name: VmHWM (most, ever), RssAnon (its own), RssFile (mapped files).

    Raises OSError where the process is gone.
    """
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    pairs = (line.split(":") for line in lines if line.startswith(("VmHWM", "RssAnon", "RssFile")))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def main() -> None:
    load(demo_directory())  # so that libraries are there already
    gc.collect()
    with suppress(OSError):  # not permitted in some containers: the peak is above what imports took all the same
        Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before = memory()
    print(json.dumps(before), flush=True)
    start = perf_counter()
    loaded = load(Path(sys.argv[1]), quantization=next(iter(sys.argv[2:]), None))
    seconds, after = perf_counter() - start, memory()
    figures = {
        "seconds": seconds,
        "held": loaded.weight_bytes,
        "peak": after["VmHWM"] - before["RssAnon"] - before["RssFile"],
        "kept": after["RssAnon"] - before["RssAnon"],
        "backend": loaded.backend.numerics.split()[0],
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
