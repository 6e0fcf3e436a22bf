"""A follower: rank 1 or up of a rank group, which loads its part of a model and computes it until rank 0 ends.

It runs in a process of this machine or in an actor on another one, with the arguments of `Followers.start`.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from model.cgroup import processors
from model.identity import checkpoint_identity
from model.loading import choose_device, load_computer
from model.parallel.follow import follow
from model.parallel.shard import Shard
from model.rank_group import GroupSettings, join
from model.settings import ModelSettings
from rpc.heap import freeze_heap
from rpc.paths import model_directory
from rpc.settings import EngineConfig

LEAST_ON_GPUS = 60.0  # seconds of an exchange: NCCL's timeout includes the computing of the step before it


def run_follower(
    config: EngineConfig, rank: int, size: int, address: str, token: bytes, lost: Callable[[str], None]
) -> None:
    """Runs a follower until rank 0 ends.

    Args:
        config: Configuration of the engine.
        rank: Rank of the follower, from 1.
        size: Count of ranks.
        address: Address of rank 0.
        token: Secret of the group.
        lost: Called on another thread with the reason why the group computes no more. This thread may then wait for a
            rank that never comes, so the callee may end the process.

    Raises:
        RankLost: The group has lost a rank.
        CheckpointError: The model's files cannot be used.
        ValueError: The configuration does not fit the model or the machine.
        OSError: Rank 0 cannot be reached.
        Exception: Any exception of a step.
    """
    freeze_heap()
    set_threads(config)
    directory = model_directory(config.model.model)
    joined = join(address, Shard(rank, size), token, group_identity(directory), group_settings(config.model), lost)
    try:
        rows, recompute = config.scheduler.max_sequences, config.scheduler.recompute
        try:
            computer = load_computer(
                directory, config.model, rows, recompute, config.sharing, joined.ranks,
                config.scheduler.step_tokens,
            )  # fmt: skip
        except Exception as error:
            joined.follower.failed(f"{type(error).__name__}: {error}")
            raise
        follow(computer.parts, joined)
    finally:
        joined.close()


def set_threads(config: EngineConfig) -> None:
    """Sets torch's thread count in this rank: `config.threads`, or an even share of torch's own default.

    Torch does not look at a container's quota. More threads than it allows wait for each other in each operation.
    """
    sharing = config.model.tensor_parallel * config.engines_here
    if config.threads is not None:
        torch.set_num_threads(config.threads)
        return
    default = torch.get_num_threads()
    quota = None if "OMP_NUM_THREADS" in os.environ else processors()
    count = max(1, min(default, quota or default) // sharing)
    if count != default:
        torch.set_num_threads(count)


def group_identity(directory: Path) -> Mapping[str, str]:
    """Returns the properties that all ranks of a group must share before they begin to load."""
    return {"checkpoint": checkpoint_identity(directory).hex()}


def group_settings(settings: ModelSettings) -> GroupSettings:
    """Returns the settings by which the ranks of a model compute together."""
    gpu, timeout = choose_device(settings.device) == "cuda", settings.tensor_parallel_timeout
    return GroupSettings(gpu, settings.kernel_directory, max(timeout, LEAST_ON_GPUS) if gpu else timeout)
