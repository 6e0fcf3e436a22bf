"""What can be wrong with a model directory, and with the processes that run a model together."""


class CheckpointError(ValueError):
    """A model directory that cannot be served; the message names file and tensor and says what to do."""


class RankLost(RuntimeError):
    """A rank of a tensor-parallel group has ended or hangs, says which one and why: the group can compute no more."""
