"""A model in one GGUF file, or in several that `llama-gguf-split` made of one. Imports no torch."""

import re
from dataclasses import dataclass
from pathlib import Path

from model.errors import CheckpointError, named
from model.gguf.metadata import Metadata
from model.gguf.reader import MOST_TENSORS, GGUFFile, TensorInfo

SUFFIX = ".gguf"
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MOST_FILES = 1000


@dataclass(frozen=True, slots=True, eq=False)
class GGUFModel:
    """A model's files.

    Attributes:
        path: The file, or the first of them.
        files: All files.
        metadata: Metadata of the first file.
        tensors: Tensors of all files by name.
    """

    path: Path
    files: tuple[GGUFFile, ...]
    metadata: Metadata
    tensors: dict[str, TensorInfo]


def is_gguf(location: Path) -> bool:
    """Returns whether a model's location is a GGUF file, not a directory."""
    return location.suffix == SUFFIX and not location.is_dir()


def model_stem(name: str) -> str:
    """Returns the name of a model by that of its file; any other name is left as it is."""
    found = PART.fullmatch(name)
    return name.removesuffix(SUFFIX) if found is None else found["stem"]


def part_paths(path: Path) -> list[Path]:
    """Returns the paths of a model's files, by the name of its first one.

    Raises:
        CheckpointError: The name is that of a later part, or of too many.
    """
    found = PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, number, count = found["stem"], int(found["number"]), int(found["count"])
    if not 1 <= count <= MOST_FILES:
        raise CheckpointError(f"{path} is named as one of {count} files, may be one of {MOST_FILES}")
    if number != 1:
        raise CheckpointError(f"{path} is part {number} of {count}: give the first, {stem}-00001-of-{count:05}{SUFFIX}")
    return [path.with_name(f"{stem}-{index:05}-of-{count:05}{SUFFIX}") for index in range(1, count + 1)]


def open_model(path: Path) -> GGUFModel:
    """Opens a model's files.

    Raises:
        CheckpointError: A file is missing, damaged, or of another model.
    """
    paths = part_paths(path)
    files = []
    for index, part in enumerate(paths):
        file = GGUFFile(part)
        _check_part(file, index, len(paths))
        files.append(file)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, one in file.tensors.items():
            if name in tensors:
                other = tensors[name].file.path.name
                raise CheckpointError(f"tensor {named(name)} stands in {other} and again in {file.path}")
            tensors[name] = one
    if len(tensors) > MOST_TENSORS:
        raise CheckpointError(f"{path} has {len(tensors)} tensors in all its parts, may have {MOST_TENSORS}")
    declared = files[0].metadata.fields.get("split.tensors.count", int, len(tensors))
    if len(paths) > 1 and declared != len(tensors):
        raise CheckpointError(f"{path}: 'split.tensors.count' is {declared}, the parts have {len(tensors)} tensors")
    return GGUFModel(path, tuple(files), files[0].metadata, tensors)


def _check_part(file: GGUFFile, index: int, count: int) -> None:
    """Raises CheckpointError unless a file is the part that its name says."""
    fields = file.metadata.fields
    declared = fields.get("split.count", int, 1)
    if declared != count and (declared > 1 or count > 1):
        raise fields.refuse(
            "split.count", f"but its name says {count}: the parts need the names that they were made with"
        )
    if count > 1 and fields.get("split.no", int) != index:
        raise fields.refuse("split.no", f"must be {index} in this file")
