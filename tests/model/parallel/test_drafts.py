"""Drafts on a model that is divided: no bit of what stays is another."""

from pathlib import Path

import pytest

from scheduler.settings import SchedulerSettings
from tests.model.test_drafts import DRAFTS, check, drafted
from tests.model.test_parity import random_prompts


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_drafts_change_no_bit(tiny: Path, kv_dtype: str) -> None:
    prompts = random_prompts([5, 33, 70], seed=9)
    settings = SchedulerSettings(max_sequences=8, max_batched_tokens=64, draft_tokens=DRAFTS)
    check(*drafted(tiny, prompts, settings, ranks=2, dtype="float32", kv_dtype=kv_dtype))
