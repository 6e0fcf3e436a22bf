"""Measures the loss of quality and the memory of 8-bit KV.

Compares the demo model's log probabilities of text that it was not trained on, teacher-forced, with KV in each dtype
and in float32.

python -m bench.kv_precision
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model.architectures.registry import load_model
from model.attention.backend import StepShape
from model.config import ModelConfig, read_config
from model.forward import ForwardBatch, Model
from model.inputs.tokenizer_files import load_tokenizer
from model.reference.attention_backend import ReferenceAttention
from model.weights import Checkpoint
from rpc.paths import model_directory

PAGE_SIZE = 16
DTYPES = ("float32", "bfloat16", "int8", "fp8")


def log_probabilities(model: Model, config: ModelConfig, kv_dtype: str, windows: list[list[int]]) -> torch.Tensor:
    """Returns log probabilities [tokens, vocabulary], float32, after each token of each window."""
    device, length = torch.device("cpu"), len(windows[0])
    layout = config.kv_layout(PAGE_SIZE, kv_dtype)
    pages = layout.pages_for(length)
    attention = ReferenceAttention(layout, pages, config.heads, kv_dtype, device)
    positions = np.arange(length)
    table = np.arange(pages, dtype=np.int32).reshape(1, 1, -1)
    shape = StepShape(np.array([[0, 0, length]], np.int32), positions, positions[None], table, np.zeros(1, np.int64))
    parts = []
    with torch.inference_mode():
        for window in windows:
            plan = attention.plan(shape)
            everywhere = torch.arange(length)
            batch = ForwardBatch(torch.tensor(window), everywhere[None], everywhere, attention, plan)
            parts.append(torch.log_softmax(model.forward(batch).logits, -1))
    return torch.cat(parts)


def quality(exact: torch.Tensor, found: torch.Tensor, windows: list[list[int]]) -> dict[str, float]:
    """Compares two results of `log_probabilities` of the same windows: perplexity, KL divergence, top tokens."""
    follows = torch.tensor([token for window in windows for token in [*window[1:], -1]])
    scored = follows >= 0
    loss = -found[scored].gather(1, follows[scored, None]).mean().item()
    divergence = (exact.exp() * (exact - found)).sum(-1)
    return {
        "perplexity": math.exp(loss),
        "kl_mean": divergence.mean().item(),
        "kl_largest": divergence.max().item(),
        "same_top_token": (found.argmax(-1) == exact.argmax(-1)).double().mean().item(),
    }


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="model directory, or demo")
    parser.add_argument("--text", type=Path, help="text to score; default: the last tenth of the demo model's text")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def read_windows(directory: Path, args: argparse.Namespace) -> list[list[int]]:
    """Returns windows of up to 512 token ids of the text."""
    text = (args.text or directory.parent / "tinyshakespeare.txt").read_text(encoding="utf-8")
    ids = load_tokenizer(directory).encode(text if args.text else text[-len(text) // 10 :], True)
    length = min(512, read_config(directory).context)
    return [ids[at : at + length] for at in range(0, min(args.tokens, len(ids) - length), length)]


def report(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values))
    else:
        print("  ".join(f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()))


def main() -> None:
    args = arguments(__doc__)
    directory = model_directory(args.model)
    windows, config = read_windows(directory, args), read_config(directory)
    model = load_model(config, Checkpoint(directory), torch.float32, torch.device("cpu"))
    exact: torch.Tensor | None = None
    for dtype in DTYPES:
        found = log_probabilities(model, config, dtype, windows)
        exact = found if exact is None else exact
        sizes = {"kv_cache_dtype": dtype, "bytes_a_token": config.kv_layout(PAGE_SIZE, dtype).token_bytes}
        report(sizes | quality(exact, found, windows), args.json)


if __name__ == "__main__":
    main()
