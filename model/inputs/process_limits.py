"""Limits that a process sets itself before it runs an untrusted program. They have an effect on Linux only."""

import sys


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
