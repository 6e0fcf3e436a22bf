"""What 8-bit weights cost in quality and save in memory: the demo model's log probabilities of text that it was not
trained on, teacher-forced, with each kind of weights beside the checkpoint's own in float32. KV is in the same dtype.

python -m bench.weight_precision
"""

import torch

from bench.kv_precision import arguments, log_probabilities, quality, read_windows, report
from model.architectures.registry import build_model
from model.config import read_config
from model.tensors import Tensors
from model.weights import Checkpoint
from rpc.paths import model_directory

KINDS = (("float32", False), ("float32", True), ("bfloat16", False), ("bfloat16", True))


def main() -> None:
    args = arguments(__doc__)
    directory = model_directory(args.model)
    windows, config = read_windows(directory, args), read_config(directory)
    exact: torch.Tensor | None = None
    for dtype, quantized in KINDS:
        tensors = Tensors(Checkpoint(directory), getattr(torch, dtype), torch.device("cpu"), quantized)
        found = log_probabilities(build_model(config, tensors), config, dtype, windows)
        exact = found if exact is None else exact
        kind = {"dtype": dtype, "quantization": "int8" if quantized else None, "weight_bytes": tensors.held.bytes}
        report(kind | quality(exact, found, windows), args.json)


if __name__ == "__main__":
    main()
