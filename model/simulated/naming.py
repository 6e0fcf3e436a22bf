"""Names of simulated models: `sim:NAME` for a profile that ships with Quire, `sim:FILE` for another."""

from pathlib import Path

from scheduler.profile import Profile, read_profile

PREFIX = "sim:"


def is_simulated(model: str) -> bool:
    """Returns whether `--model` asks for a simulated engine."""
    return model.startswith(PREFIX)


def profile_of(model: str) -> Profile:
    """Reads the profile of a simulated model.

    Args:
        model: `--model`, with its prefix.

    Raises:
        OSError: The profile cannot be read.
        ValueError: It is no profile.
    """
    name = model.removeprefix(PREFIX)
    return read_profile(str(Path(name).expanduser()) if name.startswith("~") else name)


def simulated_name(model: str) -> str:
    """Returns the name under which a simulated model is served. It keeps the prefix, so that no client errs."""
    return PREFIX + Path(model.removeprefix(PREFIX)).name.removesuffix(".json")


def checkpoint_directory() -> Path:
    """Returns the directory with the tokenizer and the chat template of simulated models."""
    return Path(__file__).parent / "checkpoint"
