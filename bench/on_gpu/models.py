"""Models of a run: their shapes, the bytes and operations of their steps, and checkpoints of random weights."""

import json
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.shapes import COMMON, EXPERT, MODELS, tensor_shapes

CONTEXT = 16_384
SHAPES: dict[str, dict[str, Any]] = {
    **MODELS,
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b/8": {  # 8 of its 48 layers
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151_936,
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Name to the fields of its config.json."""
WRITERS = 4  # files written at once
MEMORY_DISK = Path("/dev/shm")  # noqa: S108 - tempfile makes a directory of our own in it


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a model in bfloat16.

    Attributes:
        weights: Bytes of weights that each step reads.
        experts: Bytes of all experts, of which a step reads those that some token uses.
        used: Share of its experts that a token uses.
        file: Bytes of all weights.
        token: Bytes of a token's KV.
        layers: Operations of a token in the layers.
        head: Operations of a token in the output layer.
        attention: Operations of a token with each key.
    """

    weights: int
    experts: int
    used: float
    file: int
    token: int
    layers: int
    head: int
    attention: int

    @staticmethod
    def of(shape: dict[str, Any]) -> "Costs":
        sizes = [(name, size[0] * size[1]) for name, size in tensor_shapes(shape) if len(size) == 2]
        layers = sum(size for name, size in sizes if ".layers." in name and EXPERT not in name)
        experts = sum(size for name, size in sizes if EXPERT in name)
        used = shape["num_experts_per_tok"] / shape["num_experts"] if experts else 0.0
        head = shape["vocab_size"] * shape["hidden_size"]
        queries = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
        keys = shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        file = sum(size for _, size in sizes)
        of_token = 2 * layers + int(2 * experts * used)
        weights = 2 * (layers + head)
        return Costs(weights, 2 * experts, used, 2 * file, 4 * keys, of_token, 2 * head, 4 * queries)

    def step_bytes(self, contexts: float, tokens: int = 1) -> float:
        """Returns the bytes of a step.

        Args:
            contexts: Tokens of all sequences together.
            tokens: Tokens of the step, each of which uses experts at random.
        """
        read = self.experts * (1.0 - (1.0 - self.used) ** tokens)
        return self.weights + read + contexts * self.token

    def decode_operations(self, batch: int, contexts: float) -> float:
        return batch * (self.layers + self.head) + contexts * self.attention

    def prefill_operations(self, tokens: int) -> float:
        """Returns the operations of a prompt, whose last token alone goes through the output layer."""
        return tokens * self.layers + self.head + tokens * (tokens + 1) / 2 * self.attention


def place_for(size: int) -> Path:
    """Makes a directory with room for `size` bytes, in memory if enough is free. Raises OSError."""
    roots = [MEMORY_DISK, Path(tempfile.gettempdir())]
    for root in roots:
        if root.is_dir() and shutil.disk_usage(root).free > 1.2 * size and _memory_allows(root, size):
            return Path(tempfile.mkdtemp(prefix="quire-bench-", dir=root))
    raise OSError(f"no room for {size / 1e9:.1f} GB of weights in {', '.join(map(str, roots))}")


def _memory_allows(root: Path, size: int) -> bool:
    """Returns whether memory is large enough: a file in memory is there twice while it is loaded."""
    if root != MEMORY_DISK:
        return True
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return False
    available = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)
    return available * 1024 > 2 * size


def write_checkpoint(directory: Path, shape: dict[str, Any], device: torch.device) -> Path:
    """Writes random matrices and norms of 1 in bfloat16: a file for each layer, and one for the rest."""
    config = {"max_position_embeddings": CONTEXT} | shape
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, size in tensor_shapes(shape):
        part = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{part}.safetensors", []).append((name, size))

    def write(item: tuple[int, tuple[str, list[tuple[str, tuple[int, ...]]]]]) -> None:
        number, (file, tensors) = item
        made = torch.Generator(device).manual_seed(number)
        save_file({name: _tensor(size, made, device) for name, size in tensors}, directory / file)

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, enumerate(files.items())))
    index = {name: file for file, tensors in files.items() for name, _ in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (directory / "config.json").write_text(json.dumps(COMMON | config))
    return directory


def _tensor(size: tuple[int, ...], made: torch.Generator, device: torch.device) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02, generator=made).cpu()
