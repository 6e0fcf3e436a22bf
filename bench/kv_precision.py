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
from model.backend import Backend, StepSizes
from model.config import ModelConfig, read_config
from model.decoder import Decoder
from model.forward import ForwardBatch
from model.inputs.tokenizer_files import load_tokenizer
from model.reference.backend import TorchBackend
from model.weights import Checkpoint
from rpc.paths import model_directory

PAGE_SIZE = 16
CPU = torch.device("cpu")
DTYPES = ("float32", "bfloat16", "int8", "fp8")


def log_probabilities(
    backend: Backend, decoder: Decoder, config: ModelConfig, kv_dtype: str, windows: list[list[int]]
) -> torch.Tensor:
    """Returns log probabilities [tokens, vocabulary], float32, after each token of each window.

    Args:
        backend: Back end that the decoder's products are made for.
        decoder: The model.
        config: Its configuration.
        kv_dtype: Dtype of the KV cache, as the back end's.
        windows: Token ids, the same number in each window.
    """
    length = len(windows[0])
    layout = config.kv_layout(PAGE_SIZE, kv_dtype)
    pages = layout.pages_for(length)
    attention = backend.attention(config, layout, pages)
    model = backend.model(decoder, attention, StepSizes(1, length, length))
    positions = np.arange(length)
    table = np.arange(pages, dtype=np.int32).reshape(1, 1, -1)
    shape = StepShape(np.array([[0, 0, length]], np.int32), positions, positions[None], table, np.zeros(1, np.int64))
    parts = []
    with torch.inference_mode():
        for window in windows:
            plan = attention.plan(shape)
            everywhere = torch.arange(length)
            batch = ForwardBatch(torch.tensor(window), everywhere[None], everywhere, attention, plan)
            parts.append(torch.log_softmax(model.forward(batch).logits.float(), -1))
    return torch.cat(parts)


def quality(exact: torch.Tensor, found: torch.Tensor, windows: list[list[int]]) -> dict[str, float]:
    """Compares two results of `log_probabilities` of the same windows: perplexity, KL divergence, top tokens."""
    follows = torch.tensor([token for window in windows for token in [*window[1:], -1]])
    scored = follows >= 0
    loss = -found[scored].gather(1, follows[scored, None]).mean().item()
    lost = divergence(exact, found)
    return {
        "perplexity": math.exp(loss),
        "kl_mean": lost.mean().item(),
        "kl_largest": lost.max().item(),
        "same_top_token": (found.argmax(-1) == exact.argmax(-1)).double().mean().item(),
    }


def divergence(exact: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Returns the KL divergence of `found` from `exact` after each token."""
    return (exact.exp() * (exact - found)).sum(-1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of measurements of quality."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="demo", help="model directory, or demo")
    parser.add_argument("--text", type=Path, help="text to score; default: the last tenth of the demo model's text")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", action="store_true")


def read_windows(directory: Path, args: argparse.Namespace, held_out: bool = True) -> list[list[int]]:
    """Returns windows of up to 512 token ids of the text.

    Args:
        directory: Directory of the model.
        args: Parsed arguments.
        held_out: Takes the end of the demo model's text, which it was not trained on; else the beginning.
    """
    text = (args.text or directory.parent / "tinyshakespeare.txt").read_text(encoding="utf-8")
    if not args.text:
        text = text[-len(text) // 10 :] if held_out else text[: len(text) // 10]
    ids = load_tokenizer(directory).encode(text, True)
    length = min(512, read_config(directory).context)
    return [ids[at : at + length] for at in range(0, min(args.tokens, len(ids) - length), length)]


def report(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values))
    else:
        print("  ".join(f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    directory = model_directory(args.model)
    windows, config = read_windows(directory, args), read_config(directory)
    model = load_model(config, Checkpoint(directory), torch.float32, CPU)
    exact: torch.Tensor | None = None
    for dtype in DTYPES:
        found = log_probabilities(TorchBackend(dtype, CPU), model, config, dtype, windows)
        exact = found if exact is None else exact
        sizes = {"kv_cache_dtype": dtype, "bytes_a_token": config.kv_layout(PAGE_SIZE, dtype).token_bytes}
        report(sizes | quality(exact, found, windows), args.json)


if __name__ == "__main__":
    main()
