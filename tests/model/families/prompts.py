"""The prompts that every case is asked: 1 to 90 tokens, past windows and page edges; the long ones start alike."""

import numpy as np

from tests.model.families.checkpoints import VOCABULARY

LENGTHS = (1, 1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 21, 28, 32, 33, 40, 41, 48, 57, 64, 75, 89, 90)
SHARED = 40  # tokens at the start of all that are longer


def _draw() -> list[list[int]]:
    rng = np.random.default_rng(7)
    drawn = [rng.integers(1, VOCABULARY, length).tolist() for length in LENGTHS]
    head = drawn[-1][:SHARED]
    return [head + prompt[SHARED:] if len(prompt) > SHARED else prompt for prompt in drawn]


PROMPTS = _draw()
FEW = tuple(LENGTHS.index(length) for length in (2, 7, 8, 16, 17, 33, 57, 90))  # places of those that schedules run
ALIKE = tuple(i for i, length in enumerate(LENGTHS) if length > SHARED)
