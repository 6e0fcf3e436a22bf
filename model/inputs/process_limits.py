"""Limits that a process sets itself before it runs an untrusted program. They have an effect on Linux only."""

import sys
from pathlib import Path


def address_space() -> int:
    """Returns the bytes of this process's address space, 0 where /proc does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) * 4096 if statm.exists() else 0


def limit_memory(size: int) -> None:
    """Limits the address space to `size` bytes. A later call may lower it."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def limit_processor_time(seconds: int) -> None:
    """Limits processor time, counted from the start of the process, after which SIGXCPU ends it without a core file."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
