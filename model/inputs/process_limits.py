"""Limits that a process puts on itself before it runs what nobody vouches for. They do nothing but on Linux."""

import sys


def limit_memory(size: int) -> None:
    """size: bytes of address space. A later call may lower it."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def limit_processor_time(seconds: int) -> None:
    """seconds: from the beginning of the process, after which SIGXCPU ends it. It leaves no core file."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
