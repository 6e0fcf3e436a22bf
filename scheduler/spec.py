"""A client's request, as every way in states it."""

import math
import re
from dataclasses import dataclass, field

from cache_manager.block_hash import DEFAULT_TENANT
from scheduler.invalid import require
from scheduler.parameters import Output, Sampling, Stopping
from scheduler.prompts import Chat, Truncation
from scheduler.structured import Structured

CACHE_SALT = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Spec:
    """One request as a client states it. Times are seconds.

    Attributes:
        prompt: Text, token ids used as they are, or a conversation that the model's own template makes text of.
        images: PNG or JPEG files, in the order of their placeholders, or of their parts of a conversation.
        output_prefix: Output that this prompt had already, to go on from. Positions, limits and draws count it.
        cache_salt: The prefix cache is shared only with requests that have the same one.
        priority: Lower is served first, among requests of the same tenant.
        structured: Constraint on the whole output; of a conversation, on the answer behind any reasoning.
        reasoning_tokens: Most tokens of reasoning before the answer; None for any number.
        tenant: Set by the authentication interceptor, never by a client.
    """

    prompt: str | tuple[int, ...] | Chat
    images: tuple[bytes, ...] = ()
    model: str = ""
    add_special_tokens: bool = True
    output_prefix: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    output: Output = field(default_factory=Output)
    max_time: float | None = None
    max_queue_time: float | None = None
    cache_salt: str = ""
    priority: int = 0
    tenant: str = DEFAULT_TENANT
    truncation: Truncation | None = None
    structured: Structured | None = None
    reasoning_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_time", self.max_time), ("max_queue_time", self.max_queue_time)):
            require(value is None or 0 < value < math.inf, name, value, "must be a finite number of seconds above 0")
        salt = self.cache_salt
        p = self.priority
        require(-100 <= p <= 100, "priority", p, "must be in [-100, 100], lower is served first")
        require(not salt or CACHE_SALT.fullmatch(salt), "cache_salt", salt, "must be 1 to 64 of A-Z a-z 0-9 _ -")
        if isinstance(self.prompt, Chat):
            parts, given = len(self.prompt.image_fields), f"{len(self.images)} images"
            require(len(self.images) == parts, "images", given, f"the messages of the conversation have {parts}")
        bound = self.reasoning_tokens
        require(bound is None or 0 <= bound < 2**31, "reasoning.max_tokens", bound, "must be in [0, 2147483647]")
        whole = self.truncation is None or not self.images
        require(whole, "prompt_truncation", f"with {len(self.images)} images", "goes with prompts without images")

    @property
    def sharing(self) -> str:
        """Returns the name of the requests with which it may share what was computed of its inputs."""
        return f"{self.tenant}/{self.cache_salt}"

    @property
    def image_fields(self) -> tuple[str, ...]:
        """Returns the client's names of its images."""
        if isinstance(self.prompt, Chat):
            return self.prompt.image_fields
        return tuple(f"images[{i}]" for i in range(len(self.images)))
