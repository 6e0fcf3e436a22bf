"""Models that are run: their shapes, what a step of them must read and compute, and checkpoints of random weights."""

import json
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.shapes import COMMON, MODELS, tensor_shapes

CONTEXT = 16_384
SHAPES: dict[str, dict[str, Any]] = {
    **MODELS,
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""By name, as config.json has them."""
WRITERS = 4  # files that are written at once
MEMORY_DISK = Path("/dev/shm")  # noqa: S108 - tempfile makes a directory of our own in it


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a model in bfloat16. weights: bytes that each step reads. file: bytes of all. token: bytes of one's KV.
    layers, head: operations of a token in the layers, and in the output layer. attention: with each key.
    """

    weights: int
    file: int
    token: int
    layers: int
    head: int
    attention: int

    @staticmethod
    def of(shape: dict[str, Any]) -> "Costs":
        sizes = [(name, size[0] * size[1]) for name, size in tensor_shapes(shape) if len(size) == 2]
        layers = sum(size for name, size in sizes if ".layers." in name)
        head = shape["vocab_size"] * shape["hidden_size"]
        queries = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
        keys = shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        file = sum(size for _, size in sizes)
        return Costs(2 * (layers + head), 2 * file, 4 * keys, 2 * layers, 2 * head, 4 * queries)

    def step_bytes(self, contexts: float) -> float:
        """contexts: tokens that all sequences have, together."""
        return self.weights + contexts * self.token

    def decode_operations(self, batch: int, contexts: float) -> float:
        return batch * (self.layers + self.head) + contexts * self.attention

    def prefill_operations(self, tokens: int) -> float:
        """Of a prompt of which only the last token goes through the output layer."""
        return tokens * self.layers + self.head + tokens * (tokens + 1) / 2 * self.attention


def place_for(size: int) -> Path:
    """A new directory with room for so many bytes, in memory where there is some to spare. Raises OSError."""
    roots = [MEMORY_DISK, Path(tempfile.gettempdir())]
    for root in roots:
        if root.is_dir() and shutil.disk_usage(root).free > 1.2 * size and _memory_allows(root, size):
            return Path(tempfile.mkdtemp(prefix="quire-bench-", dir=root))
    raise OSError(f"no room for {size / 1e9:.1f} GB of weights in {', '.join(map(str, roots))}")


def _memory_allows(root: Path, size: int) -> bool:
    """What lies in memory is there a second time while it is loaded."""
    if root != MEMORY_DISK:
        return True
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return False
    available = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)
    return available * 1024 > 2 * size


def write_checkpoint(directory: Path, shape: dict[str, Any], device: torch.device) -> Path:
    """Random matrices, norms of 1, in bfloat16: a file for each layer, and one for the rest."""
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
