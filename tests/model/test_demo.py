"""The demo model is what its page says, and its script makes such a directory again."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from model.demo import train
from model.demo.network import DemoLlama
from model.demo.ngram import KneserNey
from model.loading import load
from model.settings import ModelSettings
from scheduler.settings import RequestLimits

CHECKPOINT = Path(train.__file__).parent / "checkpoint"


def stated(row: str) -> float:
    """Nats a token in the page's table."""
    found = re.search(rf"^\| {row}.*?\| (\d\.\d+) \|", (CHECKPOINT / "README.md").read_text(), re.MULTILINE)
    assert found
    return float(found[1])


@pytest.fixture(scope="module")
def text() -> tuple[list[int], list[int]]:
    """Token ids of the training and the held-out part."""
    plays = (Path(train.__file__).parent / "tinyshakespeare.txt").read_text()
    split = len(plays) * 9 // 10
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    parts = [train.documents(plays[:split]), train.documents(plays[split:])]
    return tuple([i for doc in part for i in tokenizer.encode(doc + train.END).ids] for part in parts)


@pytest.mark.slow
def test_stated_loss_is_that_of_the_shipped_weights(text: tuple[list[int], list[int]]) -> None:
    network = DemoLlama(train.CONFIG, dropout=0.0)
    weights = load_file(CHECKPOINT / "model.safetensors")
    network.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in weights.items()})
    loss = train.validation_loss(network, torch.tensor(text[1]), 1024)
    assert loss == pytest.approx(stated("this model"), abs=0.005)


def test_stated_baseline_is_that_of_the_trigram(text: tuple[list[int], list[int]]) -> None:
    loss = KneserNey(text[0], train.CONFIG["vocab_size"]).loss(text[1])
    assert loss == pytest.approx(stated("trigram"), abs=0.005)
    assert stated("this model") < loss


def test_trigram_probabilities_add_up_to_one() -> None:
    model = KneserNey([0, 1, 2, 0, 1, 3, 0, 2, 2, 1, 0, 1], vocabulary=5)
    for context in ((0, 1), (2, 2), (4, 4), (3, 0)):
        assert sum(model.probability(context, token) for token in range(5)) == pytest.approx(1.0)


@pytest.mark.slow
def test_training_writes_a_directory_that_loads(tmp_path: Path) -> None:
    train.main(out=tmp_path, steps=1, tokens_a_step=1024, dropout=0.2)
    assert (tmp_path / "tokenizer.json").read_text() == (CHECKPOINT / "tokenizer.json").read_text()
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in CHECKPOINT.iterdir()}
    loaded = load(tmp_path, ModelSettings(kv_cache_memory=2**20), rows=2, ahead=512, request_limits=RequestLimits())
    assert loaded.config.context == 1024
