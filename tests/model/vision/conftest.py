"""Makes the checkpoint and the results of each case once a session."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import transformers
from torch import nn

from model.architectures.registry import load_model
from model.config import read_config
from model.decoder import Decoder
from model.inputs.tokenizer import Tokenizer
from model.inputs.tokenizer_files import load_tokenizer
from model.inputs.trial import try_tokenizer
from model.inputs.vision.inputs import ImageInputs
from model.inputs.vision.registry import read_image_inputs
from model.weights import Checkpoint
from rpc.frontend import prepare
from tests.model.vision import checkpoints
from tests.model.vision.cases import Case
from tests.model.vision.pictures import picture

T = TypeVar("T")


def load_inputs(directory: Path) -> ImageInputs:
    inputs = read_image_inputs(directory, read_config(directory), load_tokenizer(directory))
    assert inputs is not None
    return inputs


def features_of_a_tile(inputs: ImageInputs) -> int:
    return inputs.process(picture(32, 32)).grid[1]


def load_decoder(directory: Path) -> Decoder:
    model = load_model(read_config(directory), Checkpoint(directory), torch.float32, torch.device("cpu"))
    assert isinstance(model, Decoder)
    return model


class Shelf:
    """Made when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[tuple[str, str], object] = {}

    def _once(self, what: str, case: Case, make: Callable[[], T]) -> T:
        key = (what, case.name)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]

    def checkpoint(self, case: Case, classic: bool = True) -> Path:
        name = case.name if classic else f"{case.name}-nested"
        return self._once(name, case, lambda: checkpoints.write(case, self._root / name, classic))

    def inputs(self, case: Case, classic: bool = True) -> ImageInputs:
        return self._once(f"inputs {classic}", case, lambda: load_inputs(self.checkpoint(case, classic)))

    def tokenizer(self, case: Case) -> Tokenizer:
        return self._once("tokenizer", case, lambda: load_tokenizer(self.checkpoint(case)))

    def processor(self, case: Case) -> Any:
        return self._once("processor", case, lambda: checkpoints.processor(case, features_of_a_tile(self.inputs(case))))

    def decoder(self, case: Case) -> Decoder:
        return self._once("decoder", case, lambda: load_decoder(self.checkpoint(case)))

    def reference(self, case: Case) -> nn.Module:
        return self._once(
            "reference", case,
            lambda: transformers.AutoModelForImageTextToText.from_pretrained(self.checkpoint(case)).eval(),
        )  # fmt: skip


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    transformers.utils.logging.disable_progress_bar()
    return Shelf(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="package", autouse=True)
def _tokenizers_are_tried_once() -> Iterator[None]:
    """A trial runs a process, and most checkpoints here have the same tokenizer. `test_trial.py` tests trials."""
    tried: set[bytes] = set()

    def try_once(directory: Path) -> None:
        content = (directory / "tokenizer.json").read_bytes()
        if content not in tried:
            try_tokenizer(directory)
            tried.add(content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "try_tokenizer", try_once)
        yield
