"""The number of torch's threads, and so of kernels', in a test's process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and one that spins for a core that is taken costs 30 times the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
