"""Computes the least time of a workload on this machine, for any engine."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from bench.peers.workloads import Workload
from bench.roofline import PRODUCT, READ, attending, kept_elements, product, products_of_pair, reader
from bench.shapes import MODELS, tensor_shapes

TRIES = 5


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Rates of the machine.

    Attributes:
        read: Bytes a second that all threads together read in sequence.
        multiply: Operations a second of torch's best product.
    """

    read: float
    multiply: float


class MachineFloor:
    """Measures the machine's rates, and computes floors from them."""

    @cached_property
    def _work(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Returns what reads and what multiplies. The product needs a CPU with AVX-512."""
        return reader(), product()

    @torch.inference_mode()
    def rates(self) -> MachineRates:
        """Measures the rates: the best of a few tries, since other processes only make them slower."""
        times = [[_seconds(work) for work in self._work] for _ in range(TRIES)]
        read, multiply = (min(column) for column in zip(*times, strict=True))
        return MachineRates(READ / read, PRODUCT / multiply)

    def floor(self, model: str, workload: Workload, rates: MachineRates, weights: int) -> float:
        """Returns the least seconds of a workload.

        All prompts are computed first, their shared prefix once. Then each running request gets a token a step, and
        the next one starts when one ends. A step reads the shared prefix once. The workload takes at least until the
        last request arrives.

        Args:
            model: Name of the model.
            workload: Requests of the run.
            rates: Rates of the machine.
            weights: Bytes of weights that a step reads.
        """
        token = token_bytes(model)
        layers, head, attention = operations_of(model)
        prompts = sum(len(asked.prompt) - workload.shared for asked in workload.requests) + workload.shared
        pairs = sum(_pairs(workload.shared, len(asked.prompt)) for asked in workload.requests)
        pairs += _pairs(0, workload.shared)
        first = prompts * layers + len(workload.requests) * head + pairs * attention
        seconds = first / rates.multiply
        waiting = [(len(asked.prompt), asked.tokens - 1) for asked in workload.requests[::-1] if asked.tokens > 1]
        running: list[tuple[int, int]] = []
        while waiting or running:
            while waiting and len(running) < workload.together:
                running.append(waiting.pop())
            context = sum(before for before, _ in running)
            read = (weights + (context - (len(running) - 1) * workload.shared) * token) / rates.read
            multiply = (len(running) * (layers + head) + context * attention) / rates.multiply
            seconds += max(read, multiply)
            running = [(before + 1, left - 1) for before, left in running if left > 1]
        return max(seconds, workload.requests[-1].arrives)


def _pairs(start: int, end: int) -> float:
    """Returns the number of pairs of a query and a key that it sees, for positions start .. end - 1."""
    return (end - start) * (end + start) / 2


def _seconds(work: object) -> float:
    began = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - began


def token_bytes(model: str) -> int:
    """Returns the bytes of what is kept of one token, in bfloat16."""
    return 2 * attending(MODELS[model]) * kept_elements(MODELS[model])


def operations_of(model: str) -> tuple[int, int, int]:
    """Returns the operations of a token in the layers, in the head, and with each key."""
    shape = MODELS[model]
    matrices = [size for name, size in tensor_shapes(shape) if len(size) == 2 and ".layers." in name]
    attention = 2 * attending(shape) * shape["num_attention_heads"] * products_of_pair(shape)
    return sum(2 * a * b for a, b in matrices), 2 * shape["vocab_size"] * shape["hidden_size"], attention
