"""Results of transformers with a checkpoint: greedy ids, and the log-probabilities of each first step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

NEW = 48
TOP = 5


@dataclass(frozen=True, eq=False)
class Reference:
    """ids: [prompt][NEW]. first: log-probabilities [prompts, vocabulary] of each first step. margins: [prompts, NEW],
    logit of the likeliest id less that of the next. places: of the prompts, among all that there are.
    """

    places: Sequence[int]
    ids: list[list[int]]
    first: NDArray[np.float32]
    margins: NDArray[np.float32]


def load(directory: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


def read(
    directory: Path, prompts: Sequence[Sequence[int]], places: Sequence[int] | None = None, padded: bool = True
) -> Reference:
    """Asks the prompts at these places, None for all. One forward pass over prompts and outputs, without cache, padding
    mask or window cache, vouches for every id. Unless `padded`, each prompt runs by itself.
    """
    model, places = load(directory), range(len(prompts)) if places is None else places
    prompts = [prompts[place] for place in places]
    ids = _generate(model, prompts) if padded else [_generate(model, [prompt])[0] for prompt in prompts]
    logits = logits_after(model, prompts, ids)
    top = logits.topk(2).values
    assert logits.argmax(-1).tolist() == ids, "transformers with a cache and without disagree"
    return Reference(places, ids, logits[:, 0].log_softmax(-1).numpy(), (top[..., 0] - top[..., 1]).numpy())


@torch.inference_mode()
def _generate(model: nn.Module, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """In one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    everything = model.generate(  # type: ignore[operator]
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return everything[:, longest:].tolist()


@torch.inference_mode()
def logits_after(model: nn.Module, prompts: Sequence[Sequence[int]], ids: Sequence[Sequence[int]]) -> Tensor:
    """[prompts, n, vocabulary]: what each of n ids after a prompt was drawn from. Causal, so padding follows unseen."""
    rows = [[*prompt, *after] for prompt, after in zip(prompts, ids, strict=True)]
    longest = max(map(len, rows))
    logits = model(torch.tensor([row + [0] * (longest - len(row)) for row in rows]), use_cache=False).logits
    return torch.stack([logits[i, len(prompts[i]) - 1 : len(row) - 1] for i, row in enumerate(rows)])
