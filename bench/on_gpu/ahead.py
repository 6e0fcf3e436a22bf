"""Compiles kernels ahead, in processes beside each other, which leave them in Triton's cache."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from bench.on_gpu.report import error_text, say

Job = tuple[Callable[..., None], Any, str]
"""A function of a module, which runs kernels, sizes, and the name of what it runs.

A name: levels of float8 have a NaN among them, so in another process a copy of them is not equal to its own.
"""


def compile_ahead(device: torch.device, jobs: Sequence[Job]) -> None:
    """Runs jobs on a GPU. One that fails is told, and fails again where its kernels are measured."""
    if device.type != "cuda":
        return
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(min(os.cpu_count() or 1, len(jobs)), context) as pool:
            for why in pool.map(run_job, jobs):
                if why:
                    say(f"compiling ahead: {why}")
    except Exception as error:  # a process ended: what it did not compile is compiled later
        say(f"compiling ahead: {error_text(error)}")
    say("kernels are compiled")


def run_job(job: Job) -> str:
    """Runs a job in a process of its own. Returns its error, or ''."""
    function, *arguments = job
    try:
        with torch.inference_mode():
            function(*arguments)
            torch.cuda.synchronize()
    except Exception as error:
        return error_text(error)
    return ""
