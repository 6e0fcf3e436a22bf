"""Settings of the prefix cache."""

from dataclasses import dataclass, field

POLICIES = ("reuse", "lru")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Prefix cache on or off, its eviction policy and the secret of its block hashes.

    The fields' help texts are those of the command line.

    Raises:
        ValueError: The eviction policy is unknown.
    """

    prefix_cache: bool = field(
        default=True, metadata={"help": "Keep the KV of full pages for other requests that start alike."}
    )
    eviction: str = field(
        default="reuse",
        metadata={
            "flag": "--eviction-policy",
            "help": "Which cached page goes first. reuse: the one least likely to be asked for again, as learned from "
            "the traffic. lru: the one asked for longest ago.",
        },
    )
    secret_file: str | None = field(
        default=None,
        metadata={
            "flag": "--cache-secret-file",
            "help": "File, readable by its owner alone, with the secret of the block hashes. Engines that may "
            "share pages need the same one. Unset: a random one.",
        },
    )

    def __post_init__(self) -> None:
        if self.eviction not in POLICIES:
            raise ValueError(f"--eviction-policy is {self.eviction!r}, must be one of {', '.join(POLICIES)}")
