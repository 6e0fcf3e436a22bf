import pytest

from model.inputs.tokenizer import Tokenizer
from tests.support.checkpoints import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())
