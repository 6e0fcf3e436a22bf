"""Settings of the KV cache's books."""

from dataclasses import dataclass, field

POLICIES = ("reuse", "lru")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What is kept of sequences that have ended, and for whom."""

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
            "help": "File, readable by nobody else, with the secret that page names are made with. Engines that may "
            "share pages need the same one. Unset: a random one.",
        },
    )

    def __post_init__(self) -> None:
        if self.eviction not in POLICIES:
            raise ValueError(f"--eviction-policy is {self.eviction!r}, must be one of {', '.join(POLICIES)}")
