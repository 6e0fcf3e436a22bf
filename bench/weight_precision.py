"""Measures the loss of quality and the memory of weights in 8 and 4 bits.

Compares the demo model's log probabilities of text that it was not trained on, teacher-forced. It does so with each
kind of weights, and with the checkpoint's own in float32. KV has the dtype of the weights.

python -m bench.weight_precision
"""

import torch

from bench.kv_precision import arguments, log_probabilities, quality, read_windows, report
from model.architectures.registry import build_model
from model.config import read_config
from model.tensors import Tensors
from model.weight_formats.registry import open_weight_format
from model.weights import Checkpoint
from rpc.paths import model_directory

KINDS = tuple((dtype, how) for dtype in ("float32", "bfloat16") for how in (None, "int8", "int4"))


def main() -> None:
    args = arguments(__doc__)
    directory = model_directory(args.model)
    windows, config = read_windows(directory, args), read_config(directory)
    exact: torch.Tensor | None = None
    for dtype, quantization in KINDS:
        weights = open_weight_format(config, quantization)
        tensors = Tensors(Checkpoint(directory), getattr(torch, dtype), torch.device("cpu"), weights)
        found = log_probabilities(build_model(config, tensors), config, dtype, windows)
        exact = found if exact is None else exact
        kind = {"dtype": dtype, "quantization": quantization, "weight_bytes": tensors.held.bytes}
        report(kind | quality(exact, found, windows), args.json)


if __name__ == "__main__":
    main()
