"""Settings of the number of engines."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """Settings of the number of engines. Times are seconds."""

    replicas: int | None = field(
        default=None,
        metadata={
            "flag": "--max-replicas",
            "help": "Most engines: more than --replicas are started as there is work for them, and ended when there is "
            "none. Unset: as many as --replicas, always.",
        },
    )
    queue: float = field(
        default=2.0,
        metadata={
            "flag": "--scale-queue",
            "help": "Predicted seconds of work in an engine's queue above which there should be more engines.",
        },
    )
    use: float = field(
        default=0.9,
        metadata={
            "flag": "--scale-use",
            "help": "Part of an engine's KV pages, or of its batch rows, in use above which there should be more.",
        },
    )
    ttft: float | None = field(
        default=None,
        metadata={
            "flag": "--scale-ttft",
            "help": "Seconds to the first token of a request to this server itself; there should be more engines where "
            "more than one in ten waits longer. Unset: no objective.",
        },
    )
    itl: float | None = field(
        default=None,
        metadata={
            "flag": "--scale-itl",
            "help": "Seconds between two tokens; there should be more engines where more than one in ten takes longer. "
            "Unset: no objective.",
        },
    )
    up: float = field(
        default=5.0,
        metadata={"flag": "--scale-up-delay", "help": "Seconds that more have to be needed before they are started."},
    )
    down: float = field(
        default=300.0,
        metadata={
            "flag": "--scale-down-delay",
            "help": "Seconds that fewer have to suffice before one is ended, and between two that are.",
        },
    )

    def __post_init__(self) -> None:
        for flag, value in (("--scale-queue", self.queue), ("--scale-ttft", self.ttft), ("--scale-itl", self.itl)):
            if value is not None and not value > 0:
                raise ValueError(f"{flag} is {value}, must be above 0")
        if not 0 < self.use <= 1:
            raise ValueError(f"--scale-use is {self.use}, must be in (0, 1]")
        for flag, value in (("--scale-up-delay", self.up), ("--scale-down-delay", self.down)):
            if not value >= 0:
                raise ValueError(f"{flag} is {value}, must be at least 0")
