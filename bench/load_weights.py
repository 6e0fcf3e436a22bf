"""Measures the time and the memory of loading a model of 0.6 billion parameters, in each weight format.

Weights are random; all layers are the first one's. Each load has a process of its own, in which the demo model was
loaded before, so that libraries and compiled kernels are there. Files are read once before: they lie in the page cache.

Columns, in MiB: `file`, bytes on disk; `held`, weights that the layers keep; `kept`, memory of its own that the process
has after loading and had not before; `own peak`, the most that this was meanwhile, looked at every few milliseconds;
`peak`, high-water mark of the resident set, with pages of the mapped file, which belong to the page cache.

Needs the packages of `make setup-dev`.

python -m bench.load_weights
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind

from bench.load_once import memory
from bench.quantized.compressed import Recipe
from bench.quantized.forms import TOKEN, Form, GGUFForm, PlainForm, compressed, float8_blocks, packed
from bench.quantized.words import Scheme
from bench.shapes import COMMON, MODELS, tensor_shapes

PLAIN = PlainForm("bfloat16", torch.bfloat16)
FORMS: tuple[tuple[Form, str | None], ...] = (
    (PLAIN, None), (PLAIN, "int8"), (PLAIN, "int4"),
    (packed("GPTQ 4 bits g128 sym", Scheme(128, symmetric=True)), None),
    (packed("GPTQ 8 bits g128 sym", Scheme(128, bits=8, symmetric=True)), None),
    (packed("AWQ 4 bits g128", Scheme(128, version="gemm")), None),
    (compressed(Recipe("W4A16 g128", size=128)), None),
    (compressed(Recipe("W8A8 int8 dynamic", "int-quantized", bits=8, strategy="channel",
                       inputs={**TOKEN, "type": "int"})), None),
    (compressed(Recipe("FP8 dynamic", "float-quantized", "float", 8, "channel", inputs={**TOKEN, "type": "float"})),
     None),
    (float8_blocks("FP8 blocks 128x128", 128), None),
    (GGUFForm("GGUF Q8_0", Kind.Q8_0, Kind.Q8_0), None), (GGUFForm("GGUF Q6_K", Kind.Q6_K, Kind.Q6_K), None),
    (GGUFForm("GGUF Q4_K", Kind.Q4_K, Kind.Q6_K), None), (GGUFForm("GGUF Q4_0", Kind.Q4_0, Kind.Q6_K), None),
)  # fmt: skip
"""Forms, and values of --quantization. Embeddings of GGUF files are in the types that llama.cpp's quantizer chooses."""

MEBIBYTE = 2**20
LOOK_SECONDS = 0.003


def write(form: Form, shape: Mapping[str, Any], directory: Path) -> Path:
    """Writes a model with random weights in a form. Returns what --model names."""
    config = {**COMMON, **shape}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.02).bfloat16()
        for name, size in tensor_shapes({**shape, "num_hidden_layers": 1})
    }
    first = form.encode(config, tensors, {}).tensors
    return form.save(config, repeated(first, config["num_hidden_layers"]), directory)


def repeated(first: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Gives all layers the tensors of the first one."""
    made = {}
    for name, tensor in first.items():
        begin, layer, end = re.fullmatch(r"(?:(.*layers\.|blk\.)0(\..*)|.*)", name).group(1, 0, 2)  # type: ignore[union-attr]
        if begin is None:
            made[layer] = tensor
            continue
        for i in range(layers):
            made[f"{begin}{i}{end}"] = tensor.clone() if isinstance(tensor, torch.Tensor) else tensor
    return made


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One load. Bytes but for `seconds`; see the columns above."""

    seconds: float
    held: int
    kept: int
    own_peak: int
    peak: int
    backend: str


def load_apart(location: Path, quantization: str | None) -> LoadFigures:
    """Loads a model in a process of its own. Raises CalledProcessError where that fails."""
    command = [sys.executable, "-m", "bench.load_once", str(location), *([quantization] if quantization else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None  # noqa: S101 - of Popen with PIPE
        before, highest = json.loads(child.stdout.readline()), 0
        loaded = threading.Event()
        lines: list[str] = []

        def read() -> None:
            lines.extend(child.stdout or ())
            loaded.set()

        reader = threading.Thread(target=read)
        reader.start()
        while not loaded.wait(LOOK_SECONDS):
            highest = max(highest, memory(str(child.pid)).get("RssAnon", 0))
        reader.join()
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    said = json.loads(lines[0])
    return LoadFigures(own_peak=max(highest - before["RssAnon"], said["kept"]), **said)


def stored_bytes(location: Path) -> int:
    """Returns the bytes of a checkpoint, and reads it, so that it lies in the page cache."""
    files = [location] if location.is_file() else sorted(location.glob("*.safetensors"))
    total = 0
    for path in files:
        with path.open("rb") as file:
            while part := file.read(2**24):
                total += len(part)
    return total


def measure(location: Path, quantization: str | None, rounds: int) -> dict[str, Any]:
    """Returns the figures of a checkpoint: medians, and the spread of the time."""
    stored = stored_bytes(location)
    loads = [load_apart(location, quantization) for _ in range(rounds)]
    seconds = [one.seconds for one in loads]
    middle = {key: median(getattr(one, key) for one in loads) for key in ("held", "kept", "own_peak", "peak")}
    return {
        "seconds": round(median(seconds), 2),
        "seconds_least": round(min(seconds), 2),
        "seconds_most": round(max(seconds), 2),
        "file": stored // MEBIBYTE,
        **{key: round(value / MEBIBYTE) for key, value in middle.items()},
        "backend": loads[0].backend,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(MODELS))
    parser.add_argument("--rounds", type=int, default=3, help="loads of each form; 0 writes the files alone")
    parser.add_argument("--only", default="", help="measure the forms whose names this regular expression finds")
    parser.add_argument("--directory", type=Path, help="keeps the files here for another run")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = args.directory or Path(scratch)
        for form, quantization in FORMS:
            name = f"{form.name} --quantization {quantization}" if quantization else form.name
            if not re.search(args.only, name):
                continue
            location = kept_file(form, args.model, root)
            if args.rounds:
                row = {"weights": name} | measure(location, quantization, args.rounds)
                print(json.dumps(row) if args.json else "  ".join(f"{key} {value}" for key, value in row.items()),
                      flush=True)  # fmt: skip


def kept_file(form: Form, model: str, root: Path) -> Path:
    """Returns the checkpoint of a form, and writes it if it is not there."""
    place = root / f"{model} {form.name}".replace(" ", "-")
    done = place / "done"
    if not done.exists():
        place.mkdir(parents=True, exist_ok=True)
        done.write_text(write(form, MODELS[model], place).name)
    name = done.read_text()
    return place if name == place.name else place / name


if __name__ == "__main__":
    main()
