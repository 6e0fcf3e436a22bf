"""Measures the loss of quality and the memory of weights in 8 bits and less, in each format that is served.

Compares the demo model's log probabilities of text that it was not trained on, teacher-forced, with those of its own
weights in float32. Checkpoints are written for the measurement, from the model's weights by nearest rounding: what
GPTQ, AWQ, LLM Compressor or llama.cpp make with calibration or a search is better. mxfp4 is missing: only stacked
experts are stored in it.

`kl_from_plain` compares with the plain weights that the checkpoint's writer says it stands for, in float32. In float32,
by the reference back end, it is 0 but for rounding, or the loss by activations in 8 bits.

Needs the packages of `make setup-dev`.

python -m bench.weight_precision
"""

import json
import re
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.kv_precision import add_arguments, divergence, log_probabilities, quality, read_windows, report
from bench.loaded import Loaded, load
from bench.quantized.calibration import largest_inputs
from bench.quantized.forms import FORMS, InputScales, PlainForm
from model.config import read_config
from model.decoder import Decoder
from model.reference.backend import TorchBackend
from rpc.paths import model_directory

WAYS = (("float32", "reference"), ("float32", "auto"), ("bfloat16", "auto"))
"""Dtypes and back ends. "auto" takes the CPU's kernels where they know the format, as a server does."""
ONLINE = (None, "int8", "int4")


class Measurement:
    """Measures forms of one model on the same text."""

    def __init__(self, directory: Path, windows: list[list[int]]) -> None:
        self._windows = windows
        self._exact = self._of(load(directory, "float32", backend="reference"))

    def _of(self, loaded: Loaded) -> Tensor:
        return log_probabilities(loaded.backend, loaded.decoder, loaded.config, loaded.dtype, self._windows)

    def rows(
        self, name: str, location: Path, quantization: str | None = None, meant: Path | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yields the figures of a checkpoint, for each of WAYS.

        Args:
            name: Name of the form.
            location: The checkpoint.
            quantization: Value of --quantization.
            meant: Plain checkpoint that it stands for.
        """
        same = None if meant is None else self._of(load(meant, "float32", backend="reference"))
        for dtype, backend in WAYS:
            loaded = load(location, dtype, quantization, backend)
            if (dtype, backend) == ("float32", "auto") and isinstance(loaded.backend, TorchBackend):
                continue  # there are no kernels, and the row is there already
            found = self._of(loaded)
            row: dict[str, Any] = {
                "weights": name,
                "dtype": dtype,
                "backend": loaded.backend.numerics.split()[0],
                "weight_bytes": loaded.weight_bytes,
            }
            row |= quality(self._exact, found, self._windows)
            if same is not None:
                row["kl_from_plain"] = divergence(same, found).mean().item()
            yield row


def calibrate(directory: Path, windows: list[list[int]]) -> InputScales:
    """Returns the largest inputs of linears on these windows."""
    config, backend = read_config(directory), TorchBackend("float32", torch.device("cpu"))

    def run(decoder: Decoder) -> Tensor:
        return log_probabilities(backend, decoder, config, "float32", windows)

    return largest_inputs(directory, run)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--only", default="", help="measure the forms whose names this regular expression finds")
    args = parser.parse_args()
    directory = model_directory(args.model)
    measurement = Measurement(directory, read_windows(directory, args))
    for quantization in ONLINE:
        if re.search(args.only, name := quantization or "plain"):
            for row in measurement.rows(name, directory, quantization):
                report(row, args.json)
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    largest = calibrate(directory, read_windows(directory, args, held_out=False))
    exact = PlainForm("float32", torch.float32)
    for form in FORMS:
        if not re.search(args.only, form.name):
            continue
        encoded = form.encode(config, tensors, largest)
        with tempfile.TemporaryDirectory() as stored, tempfile.TemporaryDirectory() as meant:
            location = form.save(config, encoded.tensors, Path(stored))
            twin = exact.save(config, exact.encode(config, {**tensors, **encoded.meant}, {}).tensors, Path(meant))
            for row in measurement.rows(form.name, location, meant=twin):
                report(row, args.json)


if __name__ == "__main__":
    main()
