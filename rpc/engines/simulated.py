"""Engines of `--model sim:NAME`: a real scheduler on an executor that computes nothing. Imports no torch."""

import logging
from collections.abc import Callable
from dataclasses import fields, replace

from model.settings import ModelSettings
from model.simulated.distribution import CANDIDATES, VOCABULARY
from model.simulated.executor import SimulatedExecutor
from model.simulated.grammars import GrammarReadiness, open_grammars
from model.simulated.naming import PREFIX, profile_of
from model.simulated.rows import SimulatedRows
from model.simulated.timeline import Timeline
from rpc.engines.local import LocalEngine
from rpc.engines.scheduling import check_settings, make_scheduler
from rpc.frontend.engine_client import EngineInfo
from rpc.settings import EngineConfig
from scheduler.blueprint import Blueprint
from scheduler.engine import Sink
from scheduler.limits import Limits
from scheduler.profile import Profile
from scheduler.readiness import Readiness
from scheduler.scheduler import Scheduler
from scheduler.step import Executor

log = logging.getLogger("quire.engines")

DEVICE, NO_WEIGHTS = "simulated", "no weights"
MEANINGFUL = (
    "model",
    "served_model_name",
    "device",
    "page_size",
    "kv_cache_memory",
    "host_cache_memory",
    "kernel_cache",
)
"""Settings of the model that a simulated engine follows, or that say nothing of it."""


class LocalSimulatedEngine(LocalEngine):
    """A `LocalEngine` whose steps do not hold up its end."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, info: EngineInfo, sink: Sink, readiness: Readiness | None,
        interrupt: Callable[[], None],
    ) -> None:  # fmt: skip
        """interrupt: Ends the time of all steps; other arguments as of `LocalEngine`."""
        super().__init__(scheduler, executor, info, sink, readiness=readiness)
        self._interrupt = interrupt

    def stop(self, timeout: float = 30.0) -> None:
        self._interrupt()
        super().stop(timeout)


def make_simulated(config: EngineConfig, sink: Sink) -> LocalEngine:
    """Returns a simulated engine, not started.

    Args:
        config: Configuration of the engine. Its settings count where the profile has others.
        sink: Gets each step's outputs.

    Raises:
        OSError: The profile cannot be read.
        ValueError: It is no profile, or a setting does nothing here.
    """
    check_settings(config, processors=False)
    check_simulated(config)
    profile, simulation = profile_of(config.model.model), config.simulation
    blueprint = blueprint_of(config, profile)
    layout, pages, ahead = blueprint.layout, blueprint.pages, blueprint.settings.ahead
    # What tokens depend on: two engines with equal numerics draw the same.
    numerics = f"simulated 1 {simulation.output_tokens}".encode()
    scheduler, _ = make_scheduler(config, blueprint, numerics)
    rows, grammars = blueprint.settings.max_sequences, open_grammars()
    limits = Limits(
        VOCABULARY, profile.context, layout.tokens_in(pages, ahead), rows, config.request,
        structured_output=grammars is not None,
    )  # fmt: skip
    costs, timeline = profile.costs.faster(simulation.speed), Timeline(faults=config.step_faults)
    executor = SimulatedExecutor(SimulatedRows(rows, simulation.output_tokens, grammars), costs, timeline, grammars)
    info = EngineInfo(limits, pages, NO_WEIGHTS, DEVICE, layout.page_size, numerics)
    log.warning(
        "this engine is SIMULATED: no model answers. Steps take the time of the profile %s, %g times as fast (%s)",
        profile.name, simulation.speed, profile.source,
    )  # fmt: skip
    readiness = None if grammars is None else GrammarReadiness(grammars)
    return LocalSimulatedEngine(scheduler, executor, info, sink, readiness, timeline.interrupt)


def check_simulated(config: EngineConfig) -> None:
    """Raises ValueError where a setting does nothing in a simulated engine, or hides that it is one."""
    settings, silent = config.model, ModelSettings()
    for one in fields(ModelSettings):
        if one.name not in MEANINGFUL and getattr(settings, one.name) != getattr(silent, one.name):
            flag = "--" + one.name.replace("_", "-")
            raise ValueError(f"{flag} does nothing with --model {settings.model}, whose engines are simulated")
    name = settings.served_model_name
    if name is not None and not name.startswith(PREFIX):
        raise ValueError(f"--served-model-name is {name!r}, must begin with {PREFIX}, since no model answers")
    if config.scheduler.recompute:
        raise ValueError(f"--recompute does nothing with --model {settings.model}, whose engines are simulated")
    for flag, needed in (
        ("--max-top-logprobs", config.request.top_logprobs),
        ("--max-beam-width", 2 * config.request.beam_width),
    ):
        if needed > CANDIDATES:
            raise ValueError(f"{flag} needs {needed} alternatives, a simulated engine has {CANDIDATES}")


def blueprint_of(config: EngineConfig, profile: Profile) -> Blueprint:
    """Returns the blueprint of a simulated engine: the profile's, with what the settings say otherwise.

    Pools keep their bytes where the page size changes. Raises ValueError where it is smaller than a page.
    """
    own, settings, cache = profile.blueprint, config.model, config.cache
    layout = replace(own.layout, page_size=settings.page_size)
    memory = settings.kv_cache_memory
    pages = own.pages * own.layout.page_bytes // layout.page_bytes if memory is None else memory // layout.page_bytes
    if pages < layout.tables:
        raise ValueError(f"--kv-cache-memory is {memory} bytes: a page of the profile takes {layout.page_bytes}")
    host = own.host_slots * own.layout.page_bytes if settings.host_cache_memory is None else settings.host_cache_memory
    slots = host // layout.page_bytes
    scheduling = config.scheduler.with_defaults(own.settings.step_tokens, own.settings.depth)
    return Blueprint(
        scheduling, config.queue, layout, pages, cache.eviction, slots if cache.prefix_cache else 0, cache.prefix_cache
    )
