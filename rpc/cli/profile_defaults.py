"""Defaults of `quire serve` where engines are simulated: a profile has settings of its own."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import typer

from cache_manager.settings import CacheSettings
from model.settings import ModelSettings
from model.simulated.naming import is_simulated, profile_of
from rpc.cli.options import parameter_of
from scheduler.policy_settings import is_ignored
from scheduler.profile import Profile
from scheduler.settings import SchedulerSettings

POLICY = "scheduling_policy"


def with_profile(context: typer.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a command's values, with the profile's in place of those that were not given.

    Flags, --config and the environment come before the profile, and the profile before Quire's own defaults. A setting
    of the profile's that the policy ignores is left out: nobody has given it.

    Args:
        context: Context of the command.
        values: Its values by parameter name.

    Raises:
        OSError: The profile cannot be read.
        ValueError: It is no profile.
    """
    if not is_simulated(values["model"]):
        return dict(values)
    defaults = profile_defaults(profile_of(values["model"]))
    chosen = {**values, **{name: value for name, value in defaults.items() if _is_default(context, name)}}
    for one in fields(SchedulerSettings):
        name = parameter_of(one)
        if _is_default(context, name) and is_ignored(one.name, chosen[POLICY]):
            chosen[name] = values[name]
    return chosen


def _is_default(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is None or source.name == "DEFAULT"


def profile_defaults(profile: Profile) -> dict[str, Any]:
    """Returns the profile's settings by parameter name: scheduling, queue, prefix cache and page size."""
    blueprint = profile.blueprint
    found = {
        parameter_of(one): getattr(settings, one.name)
        for settings in (blueprint.settings, blueprint.queue)
        for one in fields(settings)
    }
    others = {
        "prefix_cache": blueprint.prefix_cache,
        "eviction": blueprint.eviction,
        "page_size": blueprint.layout.page_size,
    }
    more = (*fields(CacheSettings), *fields(ModelSettings))
    return found | {parameter_of(one): others[one.name] for one in more if one.name in others}
