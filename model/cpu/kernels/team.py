"""The threads that run kernels: torch's own OpenMP team, so that the two never compete for the processors."""

import ctypes
from pathlib import Path

import torch


class Team:
    """Runs a function of one address in `threads` threads at once; each asks OpenMP which one it is.

    Raises OSError where torch has no OpenMP library of its own.
    """

    def __init__(self) -> None:
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
        """The address of one of the library's functions."""
        address = ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value
        if address is None:
            raise OSError(f"OpenMP has no {name}")
        return address

    def run(self, function: int, argument: int, threads: int) -> None:
        """Until it has returned in all threads. Python's interpreter lock is free meanwhile."""
        self._parallel(function, argument, threads, 0)
