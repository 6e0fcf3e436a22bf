"""What a frontend reads of a simulated model, beside its tokenizer and its chat template."""

from dataclasses import replace

from model.config import ModelConfig, read_config
from model.simulated.naming import checkpoint_directory, profile_of

ARCHITECTURE = "simulated"


def simulated_config(model: str) -> ModelConfig:
    """Returns the config of a simulated model. model: `--model`, with its prefix. Raises as `profile_of`."""
    return replace(read_config(checkpoint_directory()), architecture=ARCHITECTURE, context=profile_of(model).context)
