"""A rank that follows: it loads its part of a model and computes it, for as long as rank 0 is there.

Whatever runs it (a process of this machine, an actor on another one) gives it what `Followers` were started with.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from model.identity import checkpoint_identity
from model.loading import choose_device, load_computer
from model.parallel.follow import follow
from model.parallel.shard import Shard
from model.rank_group import Means, join
from model.settings import ModelSettings
from rpc.heap import settle
from rpc.paths import model_directory
from rpc.settings import EngineConfig


def run_follower(
    config: EngineConfig, rank: int, size: int, address: str, token: bytes, lost: Callable[[str], None]
) -> None:
    """Until rank 0 ends. address, token: of the group. lost: is told, on another thread, why the group computes no
    more; this thread may wait for it then, and be ended. Raises RankLost, CheckpointError, ValueError, OSError, and
    what a step raises.
    """
    settle()
    set_threads(config)
    directory = model_directory(config.model.model)
    joined = join(address, Shard(rank, size), token, runs(directory), means(config.model), lost)
    try:
        rows, recompute = config.scheduler.max_sequences, config.scheduler.recompute
        try:
            computer = load_computer(directory, config.model, rows, recompute, config.engines_here, joined.ranks)
        except Exception as error:
            joined.follower.failed(f"{type(error).__name__}: {error}")
            raise
        follow(computer.parts, joined)
    finally:
        joined.close()


def set_threads(config: EngineConfig) -> None:
    """Those of one rank: what is asked for, or an even part of what torch would take."""
    sharing = config.model.tensor_parallel * config.engines_here
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif sharing > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // sharing))


def runs(directory: Path) -> Mapping[str, str]:
    """What all ranks of a group must have alike before they begin to load."""
    return {"checkpoint": checkpoint_identity(directory).hex()}


def means(settings: ModelSettings) -> Means:
    gpu = choose_device(settings.device) == "cuda"
    return Means(gpu, settings.kernel_directory, settings.tensor_parallel_timeout)
