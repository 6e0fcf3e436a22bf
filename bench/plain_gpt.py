"""A plain GPT-2 with a KV cache that is allocated in advance: the baseline of Quire's paged cache.

It runs one request at a time with torch's own attention. Each layer has one buffer for the keys and values of the whole
context, cleared before the next request. Nothing is shared, queued, paged or checked.
"""

import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F


class PlainGPT:
    """A GPT2LMHeadModel in float32, of a directory whose config.json has GPT-2's defaults for the rest."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.weights = load_file(directory / "model.safetensors")
        self._layers, self._heads, self._hidden = config["n_layer"], config["n_head"], config["n_embd"]
        shape = (self._layers, self._heads, config["n_positions"], self._hidden // self._heads)
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)
        self._held = 0

    @torch.inference_mode()
    def run(self, prompt: list[int], new: int) -> tuple[list[int], float]:
        """Returns the greedy output ids, and seconds for all."""
        began = time.perf_counter()
        self._keys.zero_()
        self._values.zero_()
        self._held = 0
        ids = [self._step(prompt)]
        while len(ids) < new:
            ids.append(self._step(ids[-1:]))
        return ids, time.perf_counter() - began

    def _step(self, tokens: list[int]) -> int:
        """Computes tokens, and returns the next one. Only the first call may have more than one token."""
        start, self._held = self._held, self._held + len(tokens)
        x = self.weights["wte.weight"][tokens] + self.weights["wpe.weight"][start : self._held]
        for layer in range(self._layers):
            name = f"h.{layer}."
            x = x + self._attend(layer, self._norm(name + "ln_1", x))
            up = F.gelu(self._linear(name + "mlp.c_fc", self._norm(name + "ln_2", x)), approximate="tanh")
            x = x + self._linear(name + "mlp.c_proj", up)
        return int((self._norm("ln_f", x[-1]) @ self.weights["wte.weight"].T).argmax())

    def _attend(self, layer: int, x: Tensor) -> Tensor:
        packed = self._linear(f"h.{layer}.attn.c_attn", x)
        query, key, value = packed.view(len(x), 3, self._heads, -1).permute(1, 2, 0, 3)
        start = self._held - len(x)
        self._keys[layer, :, start : self._held], self._values[layer, :, start : self._held] = key, value
        keys, values = self._keys[layer, :, : self._held], self._values[layer, :, : self._held]
        seen = F.scaled_dot_product_attention(query, keys, values, is_causal=len(x) > 1)
        return self._linear(f"h.{layer}.attn.c_proj", seen.transpose(0, 1).reshape(len(x), self._hidden))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return torch.addmm(self.weights[name + ".bias"], x, self.weights[name + ".weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self._hidden,), self.weights[name + ".weight"], self.weights[name + ".bias"])
