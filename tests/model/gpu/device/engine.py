"""Small models, engines that run them on the device, and the law that their tokens follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaConfig, Qwen3MoeConfig

from scheduler.events import Submit
from scheduler.request import Request
from scheduler.settings import QueueLimits, SchedulerSettings
from tests.model.gpu.device.place import BACKEND, DEVICE, REHEARSED
from tests.support.checkpoints import write
from tests.support.engines import Key, Result, Rig, make_request, make_rig

VOCABULARY, CONTEXT = 1000, 512
NEW = 16
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": CONTEXT,
    "initializer_range": 0.06, "eos_token_id": None, "bos_token_id": None, "dtype": "bfloat16",
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
AHEAD = SchedulerSettings(max_sequences=6, max_batched_tokens=128, prefill_chunk=48, steps_in_flight=2)
"""Prompts are computed in chunks beside decodes, and a step is launched before the last one's tokens are known."""
ENDLESS = QueueLimits(requests=1000, pools_of_tokens=1e9, wait=1e9)


def random_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCABULARY, length).tolist() for length in lengths]


LENGTHS = (1, 2, 16, 17, 40, 100, 130, 7, 64)
PROMPTS = random_prompts(LENGTHS, seed=71)
EXACT, NEAR = 2e-3, 0.15
"""Largest differences of logprobs in float32 and in bfloat16. The dense model on a CPU: below 1e-5, and 0.032."""


def write_dense(directory: Path, **changes: object) -> Path:
    return write(LlamaConfig, directory, 3, **(SHAPE | changes))


def write_mixture(directory: Path, **changes: object) -> Path:
    return write(Qwen3MoeConfig, directory, 4, **(SHAPE | EXPERTS | changes))


def on_device(directory: Path, scheduling: SchedulerSettings = AHEAD, **options: Any) -> Rig:
    """An engine as it serves: Triton's kernels, CUDA graphs, draws on the device."""
    chosen: dict[str, Any] = {"pool_tokens": 4096, "device": DEVICE, "backend": BACKEND, "queue": ENDLESS} | options
    chosen["ahead"] = REHEARSED and scheduling.depth > 1
    return make_rig(directory, settings=scheduling, **chosen)


NUMBERS = count(1000)
"""Attempts: an engine gets none twice."""


def run(rig: Rig, prompts: Sequence[list[int]], new: int = NEW, **sampling: Any) -> list[Result]:
    """Runs prompts together, greedily unless told otherwise."""
    asked = dict(zip(NUMBERS, prompts, strict=False))
    rig.run({attempt: make_request(rig, prompt, new, **sampling) for attempt, prompt in asked.items()})
    return [result_of(rig.results, attempt, new) for attempt in asked]


def result_of(results: Mapping[Key, Result], attempt: int, new: int = NEW) -> Result:
    """Returns a result that is whole."""
    result = results[attempt]
    assert result.end is not None, f"request {attempt} has not ended"
    assert len(result.tokens) == new, f"request {attempt} has {len(result.tokens)} of {new} tokens: {result.end}"
    return result


Told = dict[int, tuple[float, list[float]]]
"""By place in a prompt: the logprob of the token there, and those of the likeliest ones."""


def logprobs_of(rig: Rig, prompts: Sequence[list[int]], top: int) -> list[Told]:
    """Returns the logprobs of prompts that an engine computes together."""
    told, asked = dict[int, Told](), dict[int, Request]()
    for attempt, prompt in zip(NUMBERS, prompts, strict=False):
        request, told[attempt] = make_request(rig, prompt, 1), {}
        asked[attempt] = replace(request, controls=replace(request.controls, prompt_logprobs=True, top_logprobs=top))
    outputs = rig.turn([Submit(attempt, request) for attempt, request in asked.items()])
    while outputs is not None:
        for part in outputs.prompt_parts:
            for place, (chosen, likeliest) in enumerate(
                zip(part.logprobs.chosen.tolist(), part.logprobs.top.tolist(), strict=True), part.start
            ):
                told[part.attempt][place] = chosen, likeliest
        outputs = rig.turn()
    for attempt, prompt in zip(asked, prompts, strict=True):
        assert sorted(told[attempt]) == [*range(1, len(prompt))], "a logprob of each token after the first"
    return list(told.values())


@dataclass(frozen=True)
class Oracle:
    """The same model in float32, computed by torch alone, which says of each token how likely it was."""

    rig: Rig

    @staticmethod
    def of(directory: Path, **options: Any) -> "Oracle":
        scheduling = SchedulerSettings(max_sequences=16, max_batched_tokens=512)
        chosen: dict[str, Any] = {"device": DEVICE, "backend": "reference", "dtype": "float32", "queue": ENDLESS}
        return Oracle(make_rig(directory, 16, 8192, scheduling, **(chosen | options)))

    def likelihoods(self, texts: Sequence[list[int]]) -> list[list[tuple[float, float]]]:
        """Returns of each token after the first its logprob, and that of the likeliest one in its place."""
        found = logprobs_of(self.rig, texts, 1)
        return [[(chosen, likeliest[0]) for _, (chosen, likeliest) in sorted(one.items())] for one in found]

    def check(self, prompts: Sequence[list[int]], results: Sequence[Result], near: float, share: float = 1.0) -> None:
        """Fails where a greedy token is none of the likeliest, or its logprob is another.

        Args:
            prompts: The prompts.
            results: Their results.
            near: Largest difference of a logprob.
            share: Least share of the tokens that are as near.
        """
        texts = [prompt + result.tokens for prompt, result in zip(prompts, results, strict=True)]
        far, tokens = list[str](), 0
        for number, (prompt, result, likely) in enumerate(zip(prompts, results, self.likelihoods(texts), strict=True)):
            for place, (token, logprob) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
                chosen, best = likely[len(prompt) + place - 1]
                tokens += 1
                if not (best - chosen <= near and abs(logprob - chosen) <= near):  # NaN is far too
                    far.append(
                        f"request {number}, token {place} is {token}, logprob {logprob:.5f}: in float32 it has "
                        f"{chosen:.5f}, the likeliest {best:.5f}"
                    )
        assert len(far) <= (1.0 - share) * tokens, f"{len(far)} of {tokens} tokens are wrong by {near:g} or more:\n" + (
            "\n".join(far[:10])
        )
