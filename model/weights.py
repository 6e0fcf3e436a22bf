"""Reads a checkpoint's safetensors, strictly: every tensor that the model needs, in the right shape, and no other.

Only safetensors: nothing here can run code from a checkpoint.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.errors import CheckpointError, named, shown
from model.fields import read_json
from model.files import open_regular
from model.gguf.split import is_gguf, part_paths

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MOST_TENSORS = 100_000
MOST_FILES = 1000
FLOAT8_BLOCK = 2**22  # numbers that are looked at together
MOST_HEADER = 16 * 2**20  # bytes; names and shapes of 100,000 tensors


class Checkpoint:
    """The tensors of a model directory by name. `take` each that is needed, then `finish`.

    Files are mapped, not read: what is converted or packed is copied once, and no more than the tensor at hand is there
    twice.

    Attributes:
        described: Name of the file that says which tensors the model has, for errors.
        finite: Tensors with values that are not finite are refused.
        progress: Called with the bytes of each tensor that is taken.
    """

    described = "config.json"

    def __init__(self, directory: Path, finite: bool = False, progress: Callable[[int], object] | None = None) -> None:
        files: dict[str, Path] = {}
        self._open: dict[Path, safe_open] = {}
        for path in weight_files(directory):
            handle = _open(path)
            self._open[path] = handle
            for name in handle.keys():  # noqa: SIM118 - a safe_open handle is no dict
                if name in files:
                    raise CheckpointError(f"{named(name)} stands in {files[name].name} and again in {path.name}")
                files[name] = path
        if len(files) > MOST_TENSORS:
            raise CheckpointError(f"{directory} holds {len(files)} tensors, more than {MOST_TENSORS}")
        self._begin(directory, files, finite, progress)

    def _begin(
        self, location: Path, files: dict[str, Path], finite: bool, progress: Callable[[int], object] | None
    ) -> None:
        """Starts with no tensor taken; `files` has the file of each."""
        self._location, self._files, self._finite, self._progress = location, files, finite, progress
        self._taken: set[str] = set()
        self._ignored: list[re.Pattern[str]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        """Yields the names of all tensors."""
        return iter(self._files)

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None, /, stored: torch.dtype | None = None
    ) -> Tensor:
        """Reads a tensor, as `model.source.TensorSource.take`."""
        path = self._files.get(name)
        if path is None:
            raise CheckpointError(
                f"{self._shown(name)} is missing from {self._location}. Is the checkpoint of another model?"
            )
        tensor, copied = self._read(name, dtype, stored)
        if shape == (1,) and tensor.ndim == 0:
            tensor = tensor.view(1)  # one number, as a scale of a whole tensor, is saved with or without a dimension
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._shown(name)} in {path.name} has shape {list(tensor.shape)}, {self.described} needs "
                f"{list(shape)}. Is the checkpoint of another model, or transposed?"
            )
        if not (tensor.is_floating_point() if stored is None else tensor.dtype == stored):
            raise CheckpointError(
                f"{self._shown(name)} in {path.name} is of {tensor.dtype}, must be "
                f"{'floating point' if stored is None else stored}"
            )
        if self._finite and (count := count_not_finite(numbers := self._numbers(name, tensor, stored))):
            raise CheckpointError(
                f"{self._shown(name)} in {path} has {count} of {numbers.numel()} values that are infinite or not a "
                "number"
            )
        self._taken.add(name)
        if self._progress is not None:
            self._progress(tensor.numel() * tensor.element_size())
        return tensor if dtype is None else tensor.to(dtype, copy=not copied)

    def _read(self, name: str, dtype: torch.dtype | None, stored: torch.dtype | None) -> tuple[Tensor, bool]:  # noqa: ARG002
        """Reads a tensor of `take`. Returns it, and whether it is a copy already."""
        path = self._files[name]
        try:
            return self._open[path].get_tensor(name), False
        except SafetensorError as error:
            raise CheckpointError(f"{named(name)} in {path} cannot be read: {error}") from None

    def _numbers(self, name: str, tensor: Tensor, stored: torch.dtype | None) -> Tensor:  # noqa: ARG002
        """Returns the numbers that a tensor of `take` stands for."""
        return tensor

    def _shown(self, name: str) -> str:
        """Returns the name of a tensor for a message."""
        return name

    def ignore(self, pattern: str) -> None:
        """Permits tensors whose full name matches the pattern, which are then neither needed nor left over."""
        self._ignored.append(re.compile(pattern))

    def finish(self) -> None:
        """Raises CheckpointError if a tensor was left over that is not to be ignored."""
        unknown = sorted(self._files.keys() - self._taken)
        left = [name for name in unknown if not any(pattern.fullmatch(name) for pattern in self._ignored)]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise CheckpointError(
                f"{named(left[0])} in {self._files[left[0]].name}{more} is not part of the model that {self.described} "
                f"describes. Do {self.described} and the weights belong together?"
            )


def count_not_finite(tensor: Tensor) -> int:
    """Counts values that are infinite or not a number, of any dtype."""
    if not tensor.is_floating_point():
        return 0
    if tensor.element_size() > 1:
        return int(torch.count_nonzero(~torch.isfinite(tensor)))
    # torch has no isfinite for most kinds of float8. A block at a time: float32 takes four times their memory.
    return sum(count_not_finite(block.float()) for block in tensor.flatten().split(FLOAT8_BLOCK))


def weight_files(directory: Path) -> list[Path]:
    """Returns the model's safetensors files, or the parts of its GGUF file. Raises CheckpointError."""
    if is_gguf(directory):
        return part_paths(directory)
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        others = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f"; found {', '.join(others[:3])}, but only safetensors are loaded" if others else ""
        raise CheckpointError(f"{directory} has neither {single.name} nor {index.name}{hint}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: 'weight_map' is missing or not a map of tensors to files")
    names = sorted(set(weight_map.values()))
    if len(names) > MOST_FILES:
        raise CheckpointError(f"{index} names {len(names)} files, may name {MOST_FILES}")
    paths = []
    for name in names:
        path = directory / name
        if path.parent != directory or not os.path.isfile(path):  # False too for a name that no file can have
            raise CheckpointError(f"{index} names {shown(name)}, which is no file in {directory}")
        paths.append(path)
    return paths


def _open(path: Path) -> safe_open:
    with open_regular(path) as file:
        beginning = file.read(len(LFS_POINTER))
    if beginning == LFS_POINTER:
        raise CheckpointError(f"{path} is a git-lfs pointer, not the weights: run `git lfs pull` in its repository")
    if (header := int.from_bytes(beginning[:8], "little")) > MOST_HEADER:
        raise CheckpointError(
            f"{path} has a header of {header} bytes, may have {MOST_HEADER}: is it a safetensors file?"
        )
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file ({error}): was the download cut off?") from None
