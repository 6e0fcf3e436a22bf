"""A server's rates, from its totals at two times."""

from dataclasses import dataclass

from quire.v1 import admin_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a server between two times.

    Attributes:
        seconds: Time between the two.
        generated: Output tokens a second.
        prompt: Prompt tokens a second.
        ttft: Mean seconds to the first token, of the first tokens that came; None where none came.
        cached: Part of the prompt tokens that the prefix cache had, 0 to 1; None where no prompt started.
    """

    seconds: float
    generated: float
    prompt: float
    ttft: float | None
    cached: float | None


def rates(before: pb.Load, after: pb.Load) -> Rates | None:
    """Returns the rates between two loads of a server.

    None where no time has passed, or where another server answered the second time: its totals begin again.
    """
    seconds = (after.uptime.ToNanoseconds() - before.uptime.ToNanoseconds()) / 1e9
    generated = after.generation_tokens_total - before.generation_tokens_total
    prompt = after.prompt_tokens_total - before.prompt_tokens_total
    firsts = after.first_tokens_total - before.first_tokens_total
    waited = (after.first_token_time_total.ToNanoseconds() - before.first_token_time_total.ToNanoseconds()) / 1e9
    cached = after.cached_prompt_tokens_total - before.cached_prompt_tokens_total
    if seconds <= 0 or min(generated, prompt, firsts) < 0:
        return None
    return Rates(
        seconds,
        generated / seconds,
        prompt / seconds,
        waited / firsts if firsts else None,
        cached / prompt if prompt else None,
    )
