"""A logits processor of your own: no token stands twice in an answer to a prompt of three tokens or more.

    python examples/logits_processor.py

On a server, give it an entry point `quire.logits_processors` in your package's pyproject.toml, and name that:

    [project.entry-points."quire.logits_processors"]
    no-repeats = "your_package:no_repeats"

    quire serve --logits-processors no-repeats
"""

import numpy as np
import torch
from quire import LLM, LogitsProcessor, Sampling, Stopping

LEAST = 3  # shorter prompts are left alone


class NoRepeats:
    """The processor of one sequence: gets each drawn token, and changes the logits of the next one."""

    def __init__(self) -> None:
        self._drawn: list[int] = []

    def drew(self, token: int) -> None:
        self._drawn.append(token)

    def apply(self, logits: torch.Tensor, position: int) -> torch.Tensor:  # noqa: ARG002 - the protocol's
        logits[self._drawn] = -torch.inf
        return logits


def no_repeats(prompt: np.ndarray) -> LogitsProcessor | None:
    """Makes a prompt's processor; None leaves its sequence alone. prompt: int32 [tokens]."""
    return NoRepeats() if len(prompt) >= LEAST else None


def main() -> None:
    with LLM(kv_cache_memory=64 * 2**20, logits_processors=[no_repeats]) as llm:
        for completion in llm.generate(["ROMEO: I say", "A"], Sampling(temperature=0.0), Stopping(max_tokens=30)):
            ids = completion.token_ids
            print(f"{completion.prompt}{completion.text}")
            print(f"[{len(ids) - len(set(ids))} of {len(ids)} tokens are repeats]\n")


if __name__ == "__main__":
    main()
