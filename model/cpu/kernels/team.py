"""Threads that run kernels: torch's own OpenMP team, so that the two never compete for the processors."""

import ctypes
from pathlib import Path

import torch


class Team:
    """Runs a function of one address in several threads at once. Each thread asks OpenMP for its number."""

    def __init__(self) -> None:
        """Loads torch's OpenMP library.

        Raises:
            OSError: torch has no OpenMP library of its own.
        """
        libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
        if not libraries:
            raise OSError("torch has no OpenMP library beside it")
        self._library = ctypes.CDLL(str(libraries[0]))
        self._parallel = self._library.GOMP_parallel
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def symbol(self, name: str) -> int:
        """Returns the address of a function of the library."""
        address = ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value
        if address is None:
            raise OSError(f"OpenMP has no {name}")
        return address

    def run(self, function: int, argument: int, threads: int) -> None:
        """Runs a function in `threads` threads, and returns when all have. The interpreter lock is free meanwhile."""
        self._parallel(function, argument, threads, 0)
