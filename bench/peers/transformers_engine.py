"""Runs transformers' generate over batches of up to 16 requests, padded on the left.

python -m bench.peers.transformers_engine MODEL KV_TOKENS

It ignores KV_TOKENS: its cache grows with the batch.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.peers.worker import Trace, serve
from bench.peers.workloads import PeerRequest, Workload

BATCH = 16


class TransformersBatches:
    """transformers' generate as a `PeerEngine`."""

    def __init__(self, model: str, _: str) -> None:
        import torch
        import transformers

        torch.set_num_threads(os.cpu_count() or 1)
        transformers.logging.set_verbosity_error()
        self.version, self._torch = transformers.__version__, torch
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self._model = loaded.eval()

    def run(self, workload: Workload) -> Sequence[Trace]:
        """Runs a workload whose requests all arrive at once: generate has no queue."""
        requests, traces = workload.requests, list[Trace]()
        if requests[-1].arrives:
            raise RuntimeError(f"{workload.name}: generate takes what is there at once")
        for start in range(0, len(requests), BATCH):
            traces += self._batch(requests[start : start + BATCH])
        return traces

    def _batch(self, requests: list[PeerRequest]) -> list[Trace]:
        torch, moments, drawn = self._torch, list[float](), list[list[int]]()
        width, tokens = max(len(asked.prompt) for asked in requests), max(asked.tokens for asked in requests)
        ids, mask = (torch.zeros(len(requests), width, dtype=torch.long) for _ in range(2))
        for row, asked in enumerate(requests):
            ids[row, -len(asked.prompt) :] = torch.tensor(asked.prompt)
            mask[row, -len(asked.prompt) :] = 1

        def note(ids: Any, scores: object, **rest: object) -> object:  # noqa: ARG001 - as transformers calls it
            moments.append(time.perf_counter())
            drawn.append(ids[:, -1].tolist())
            return torch.zeros(len(requests), dtype=torch.bool)

        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[note],
            )
        return [
            Trace(moments[: asked.tokens], [step[row] for step in drawn[: asked.tokens]])
            for row, asked in enumerate(requests)
        ]


if __name__ == "__main__":
    serve(lambda: TransformersBatches(*sys.argv[1:]))
