"""Settings whose defaults depend on the device, with GPUs that are not there."""

import logging
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.loading import LoadedModel, load
from model.settings import ModelSettings
from rpc.engines import assembly, device_defaults
from rpc.engines.device_defaults import device_settings
from rpc.engines.group import Followers
from rpc.settings import EngineConfig
from scheduler.settings import SchedulerSettings

GIB = 2**30
UNSET = EngineConfig(model=ModelSettings(kv_cache_memory=2**20))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a GPU of 80 GB, where models are loaded on the CPU all the same."""
    monkeypatch.setattr(device_defaults, "choose_device", lambda _: "cuda")
    monkeypatch.setattr(device_defaults, "gpu_bytes", lambda: int(79.1 * GIB))
    return monkeypatch


@pytest.mark.parametrize(
    ("gib", "engines", "tokens"),
    [
        (7.6, 1, 2048),
        (22.0, 1, 2048),  # L4, A10
        (31.8, 1, 2048),  # RTX 5090
        (39.4, 1, 4096),  # A100
        (44.3, 1, 4096),  # L40S
        (79.1, 1, 8192),  # H100
        (139.8, 1, 8192),  # H200
        (79.1, 2, 4096),
        (139.8, 2, 4096),
        (139.8, 8, 2048),
    ],
)
def test_a_gpus_budget_follows_from_the_memory_of_each_engine(
    gib: float, engines: int, tokens: int, gpu: pytest.MonkeyPatch
) -> None:
    gpu.setattr(device_defaults, "gpu_bytes", lambda: int(gib * GIB))
    made = device_settings(replace(UNSET, engines_on_gpu=engines))
    assert (made.max_batched_tokens, made.steps_in_flight) == (tokens, 2)
    assert (made.step_tokens, made.chunk, made.ahead) == (tokens, tokens, 2 * tokens)


def test_a_cpu_has_the_defaults_that_settings_assume() -> None:
    config = replace(UNSET, model=ModelSettings(device="cpu"), engines_on_gpu=4)
    made = device_settings(config)
    assert (made.max_batched_tokens, made.steps_in_flight) == (512, 1)
    assert (made.step_tokens, made.depth) == (config.scheduler.step_tokens, config.scheduler.depth)


@given(
    tokens=st.none() | st.integers(2**12, 2**20),
    depth=st.none() | st.integers(1, 2),
    rows=st.integers(1, 2**12),
    default=st.integers(1, 2**14),
)
def test_what_is_set_stays_and_what_is_unset_goes_with_the_sequences(
    tokens: int | None, depth: int | None, rows: int, default: int
) -> None:
    settings = SchedulerSettings(tokens, rows, steps_in_flight=depth)
    made = settings.with_defaults(default, 2)
    assert made.max_batched_tokens == (max(default, rows) if tokens is None else tokens)
    assert made.steps_in_flight == (depth or 2)
    assert replace(made, max_batched_tokens=tokens, steps_in_flight=depth) == settings
    assert made.with_defaults(1, 1) == made


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (UNSET, "--max-batched-tokens is 8192, the default of a GPU with 79.1 GiB"),
        (
            replace(UNSET, engines_on_gpu=2),
            "--max-batched-tokens is 4096, the default of a GPU with 79.1 GiB for 2 engines",
        ),
        (
            replace(UNSET, scheduler=SchedulerSettings(max_sequences=9000)),
            "--max-batched-tokens is 9000, the default of a GPU with 79.1 GiB, raised to --max-sequences",
        ),
        (replace(UNSET, scheduler=SchedulerSettings(512)), None),
    ],
    ids=["alone", "shared", "raised", "set"],
)
@pytest.mark.usefixtures("gpu")
def test_the_log_says_which_budget_was_chosen_and_why(
    config: EngineConfig, line: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "quire.engines"):
        device_settings(config)
    assert caplog.messages == ([] if line is None else [line])


def test_the_scheduler_and_the_measured_step_have_the_same_budget(gpu: pytest.MonkeyPatch) -> None:
    """The memory of the largest step is measured with the budget that the scheduler fills."""
    seen = list[int]()

    def watched(*values: Any, step_tokens: int, **named: Any) -> LoadedModel:
        seen.append(step_tokens)
        return load(*values, step_tokens=step_tokens, **named)

    gpu.setattr(assembly, "load", watched)
    parts = assembly.assemble(UNSET)
    settings = parts.scheduler.settings
    assert (seen, settings.max_batched_tokens, settings.steps_in_flight) == ([8192], 8192, 2)


@pytest.mark.usefixtures("gpu")
def test_followers_get_the_chosen_budget() -> None:
    """They may see another device than rank 0."""
    seen = list[EngineConfig]()

    def followers(config: EngineConfig) -> Followers:
        seen.append(config)
        raise ValueError("no rank is started")

    with pytest.raises(ValueError, match="no rank is started"):
        assembly.assemble(replace(UNSET, model=ModelSettings(tensor_parallel=2)), followers)
    (config,) = seen
    assert (config.scheduler.max_batched_tokens, config.scheduler.steps_in_flight) == (8192, 2)
    assert EngineConfig.from_json(config.to_json()).scheduler.step_tokens == 8192
