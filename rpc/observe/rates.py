"""What a server does in a second, from two looks at its totals."""

from dataclasses import dataclass

from quire.v1 import admin_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class Rates:
    """Between two looks. seconds: from one to the other. generated, prompt: tokens a second. ttft: seconds to the first
    token, mean of those that came; None where none did. cached: part of the prompt tokens that the prefix cache had;
    None where no prompt started.
    """

    seconds: float
    generated: float
    prompt: float
    ttft: float | None
    cached: float | None


def rates(before: pb.Load, after: pb.Load) -> Rates | None:
    """None where no time has gone by, or another server answered the second time: its totals begin again."""
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
