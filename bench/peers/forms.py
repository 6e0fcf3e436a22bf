"""The forms of a checkpoint that sides read, each made once from the plain one, and the bytes of their weights."""

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench.peers.as_gptq import convert as write_gptq
from model.backends import choose_backend
from model.config import read_config
from model.footprint import shape_of
from model.gguf.split import is_gguf, open_model
from model.settings import ModelSettings
from model.weight_formats.format import MadeProduct


class MissingForm(Exception):
    """Reports why a checkpoint cannot be made here."""


def checkpoint(peers: Path, model: Path, form: str) -> Path:
    """Returns a checkpoint in a form, and makes it if it does not exist.

    Args:
        peers: Directory of the virtual environments.
        model: Directory of the plain checkpoint.
        form: One of FORMS.

    Raises:
        MissingForm: What makes it is missing, or fails.
    """
    suffix, make = FORMS[form]
    place = model.with_name(f"{model.name}{suffix}")
    if not place.exists():
        unfinished = place.with_name(f"unfinished-{place.name}")
        try:
            make(peers, model, unfinished)
        except (OSError, ImportError, subprocess.CalledProcessError) as error:
            raise MissingForm(f"{place} cannot be made: {error}") from None
        unfinished.rename(place)
    return place


def _write_gguf(_: Path, model: Path, out: Path) -> None:
    from bench.peers.as_gguf import convert  # here: it needs the gguf package, plain sides do not

    convert(model, out)


def _quantize_gguf(kind: str, peers: Path, model: Path, out: Path) -> None:
    python, source = peers / "llama" / "bin" / "python", checkpoint(peers, model, "bf16")
    subprocess.run([python, "-m", "bench.peers.llama_cpp_quantizer", source, kind, out], check=True)


Maker = Callable[[Path, Path, Path], None]
"""Takes the directory of virtual environments, the plain checkpoint, and the place of the new one."""

FORMS: dict[str, tuple[str, Maker]] = {
    "plain": ("", lambda *_: None),
    "gptq8": ("-gptq8", lambda _, model, out: write_gptq(model, out)),
    "bf16": (".bf16.gguf", _write_gguf),
    **{kind: (f".{kind}.gguf", partial(_quantize_gguf, kind)) for kind in ("q8_0", "q4_0", "q4_k_m")},
}
"""Suffix of the name by form, and what makes it. The last four are GGUF files."""


def stored_bytes(place: Path) -> int:
    """Returns the bytes of a checkpoint's matrices on disk. Raises CheckpointError."""
    if is_gguf(place):
        return sum(tensor.nbytes for tensor in open_model(place).tensors.values() if len(tensor.shape) > 1)
    return sum(tensor.nbytes for tensor in load_file(place / "model.safetensors").values() if tensor.ndim > 1)


def held_bytes(place: Path, quantization: str | None) -> int:
    """Returns the bytes of the weights that Quire multiplies with in a step, as this machine's kernels keep them.

    0 where there are no kernels for them. Raises CheckpointError where the checkpoint cannot be served.
    """
    config = read_config(place)
    settings = ModelSettings(str(place), quantization=quantization)
    maker, total = choose_backend(config, settings, config.dtype, config.dtype, "cpu").maker, 0

    def counted(*asked: Any) -> MadeProduct | None:
        nonlocal total
        made = None if maker is None else maker(*asked)
        total += 0 if made is None else made.nbytes
        return made

    shape_of(config, getattr(torch, config.dtype), quantization, counted)
    return total
