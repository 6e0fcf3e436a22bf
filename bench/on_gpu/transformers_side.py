"""Runs transformers' continuous batching like its own documentation, with its own defaults."""

import inspect
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from bench.on_gpu.loads import EngineRequest
from bench.on_gpu.memory import free

MEMORY = 0.5  # share of the device's free memory for its cache, since another engine has its own
PATIENCE = 120.0  # seconds without the end of a request, after which it counts as stuck


class TransformersManager:
    """transformers' continuous batching; at the end of its context the model's memory is free."""

    def __init__(self, directory: Path, device: torch.device, longest: tuple[int, int], requests: int) -> None:
        """Loads a model, and starts its manager. Exceptions of transformers pass through.

        Args:
            directory: Checkpoint of the model.
            device: Device to run on.
            longest: Most tokens of a prompt and of an output.
            requests: Requests of a round.
        """
        import transformers

        transformers.logging.set_verbosity_error()
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self._model = loaded.to(device).eval()
        self._manager: Any = None
        generation = transformers.GenerationConfig(
            max_new_tokens=longest[1], do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        start = self._model.init_continuous_batching
        self._manager = start(generation_config=generation, **_options(start, longest, requests))
        if hasattr(self._manager, "warmup"):
            self._manager.warmup()
        self._manager.start()
        chosen = getattr(self._manager, "continuous_batching_config", None)
        self.about = (
            f"transformers {transformers.__version__}, ContinuousBatchingManager, attention "
            f"{self._model.config._attn_implementation}, CUDA graphs {getattr(chosen, 'use_cuda_graph', 'as it likes')}"
        )

    def __enter__(self) -> "TransformersManager":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.stop(block=True, timeout=30)
        if hasattr(self._manager, "destroy"):
            self._manager.destroy()
        self._manager = self._model = None
        free()

    def run(self, asked: Sequence[EngineRequest]) -> tuple[float, list[int]]:
        """Runs requests at once; returns seconds, and the id of each first token.

        Raises:
            RuntimeError: Tokens are missing.
        """
        began = time.perf_counter()
        names = {
            self._manager.add_request(one.prompt, max_new_tokens=one.tokens): i for i, one in enumerate(asked)
        }  # fmt: skip
        firsts, left, last = [-1] * len(asked), len(asked), began
        while left:
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running() or time.perf_counter() > last + PATIENCE:
                    raise RuntimeError(f"{left} of {len(asked)} requests did not end")
                continue
            if not result.is_finished():
                continue
            place, last = names[result.request_id], time.perf_counter()
            if result.error or len(result.generated_tokens) != asked[place].tokens:
                came = len(result.generated_tokens)
                raise RuntimeError(f"{came} of {asked[place].tokens} tokens came: {result.error}")
            firsts[place] = int(result.generated_tokens[0])
            left -= 1
        return last - began, firsts


def _options(start: Any, longest: tuple[int, int], requests: int) -> dict[str, Any]:
    """Returns the options about cache and load that this version of transformers has."""
    known, options = inspect.signature(start).parameters, dict[str, Any]()
    if "continuous_batching_config" in known:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        options["continuous_batching_config"] = ContinuousBatchingConfig(max_memory_percent=MEMORY)
    if "workload_hints" in known:
        from transformers.generation.continuous_batching.utils import WorkloadHints

        options["workload_hints"] = WorkloadHints(
            max_prompt_length=longest[0], max_generated_length=longest[1], num_requests=requests
        )
    return options
