"""Checks the kernels of recurrent layers: a convolution, and the recurrences of published models."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.on_gpu import truth
from bench.on_gpu.pages import Slices, picked, poisoned
from bench.on_gpu.states import LAYER, StateBook
from bench.on_gpu.truth import Error, Tolerance
from model.attention.recurrence import LinearRecurrence
from model.recurrent import DeltaShape, ScanShape

Shape = DeltaShape | ScanShape
SHAPES: dict[str, Shape] = {
    "delta rule of Qwen 3.5": DeltaShape(2, 4, 128, 128, 4),
    "delta rule of Kimi Linear": DeltaShape(2, 2, 128, 128, 4, by_row=True),
    "scan of Mamba-2": ScanShape(8, 2, 64, 128, 4),
    "scan of Falcon-H1": ScanShape(4, 1, 64, 256, 4),
}
STEPS: Sequence[Slices] = ([(0, 0, 61), (1, 0, 7)], [(1, 7, 1), (0, 61, 1)], [(0, 62, 18), (1, 8, 1)])
"""Prefills, decodes, and a prefill that goes on beside a decode."""

TOLERANCE = Tolerance(1e-5, 3e-6)  # in float32, of the largest magnitude


def recurrence_checks(device: torch.device) -> Iterator[tuple[str, Callable[[], Error], Tolerance]]:
    """Yields the checks, as `check_parts.checks` does."""
    for name, shape in SHAPES.items():
        yield name, partial(recurred, device, shape), TOLERANCE
    yield "short convolution", partial(convolved, device, SHAPES["delta rule of Qwen 3.5"]), TOLERANCE


def random_recurrence(device: torch.device, shape: Shape, tokens: int, seed: int = 0) -> LinearRecurrence:
    """Returns a recurrence over random tokens, whose queries, keys and values lie in one tensor as a layer's do."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    mixed, rates = random(tokens, shape.channels), torch.sigmoid(random(tokens, shape.heads))
    if isinstance(shape, DeltaShape):
        kept = torch.sigmoid(random(tokens, shape.heads, shape.key_dim if shape.by_row else 1) + 2)
        queries, keys, values = mixed.split((shape.keys, shape.keys, shape.values), 1)
        groups, skip, scale = shape.key_heads, None, shape.key_dim**-0.5
    else:
        kept = torch.sigmoid(random(tokens, shape.heads, 1) + 2)
        values, keys, queries = mixed.split((shape.values, shape.keys, shape.keys), 1)
        groups, skip, scale = shape.groups, random(shape.heads), None
    queries, keys = (part.view(tokens, groups, -1) for part in (queries, keys))
    values = values.view(tokens, shape.heads, -1)
    return LinearRecurrence(queries, keys, values, kept, rates, scale is not None, scale, skip)


def packed(sequences: Sequence[LinearRecurrence], slices: Slices) -> LinearRecurrence:
    """Returns the recurrence of the slices' tokens, one slice after the other."""

    def part(name: str) -> Tensor:
        return picked([getattr(one, name) for one in sequences], slices)

    return replace(
        sequences[0],
        queries=part("queries"),
        keys=part("keys"),
        values=part("values"),
        kept=part("kept"),
        rates=part("rates"),
    )


def recurred(device: torch.device, shape: Shape) -> Error:
    """Checks a recurrence over two sequences in several steps."""
    book, first = StateBook.of(shape, 2, 128, device), random_recurrence(device, shape, 80)
    whole = first, replace(random_recurrence(device, shape, 80, seed=1), skip=first.skip)

    def step(slices: Slices) -> Tensor:
        return book.states.recur(LAYER, packed(whole, slices), book.plan(slices))

    return _worst(step, [truth.recurred(one) for one in whole])


def convolved(device: torch.device, shape: Shape) -> Error:
    """Checks a convolution with a bias, likewise."""
    generator = torch.Generator().manual_seed(0)
    book = StateBook.of(shape, 2, 128, device)
    inputs = torch.randn((2, 80, shape.channels), generator=generator).to(device)
    taps, bias = (torch.randn(sizes, generator=generator).to(device) for sizes in ((shape.channels, 4), shape.channels))

    def step(slices: Slices) -> Tensor:
        return book.states.convolve(LAYER, picked(list(inputs), slices), taps, bias, True, book.plan(slices))

    return _worst(step, [truth.convolved(one, taps, bias) for one in inputs])


def _worst(step: Callable[[Slices], Tensor], expected: Sequence[Tensor]) -> Error:
    """Runs all steps. Returns the largest error beside the results of whole sequences."""
    errors = []
    for slices in STEPS:
        with poisoned():
            found = step(slices)
        want = picked(expected, slices)
        error = Error.of(found, want)
        errors.append(Error(error.most / float(want.abs().max()), error.norm))
    return Error.worst(errors)
