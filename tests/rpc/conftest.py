import pytest

from model.inputs.tokenizer import Tokenizer
from rpc.link import kv_transfers
from tests.support.checkpoints import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


@pytest.fixture
def patient_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a KV transfer take 15 s, since a machine that is busy is no source that hangs."""
    monkeypatch.setattr(kv_transfers, "TRANSFER_SECONDS", 15.0)
