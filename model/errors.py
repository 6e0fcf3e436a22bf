"""What can be wrong with a model directory."""


class CheckpointError(ValueError):
    """A model directory that cannot be served; the message names file and tensor and says what to do."""
