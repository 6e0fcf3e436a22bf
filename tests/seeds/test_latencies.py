"""The time to a first token and the time between tokens are measured apart."""

from model.inputs.tokenizer import Tokenizer
from scheduler.events import EndReason
from scheduler.spec import Spec
from tests.support.checkpoints import byte_tokenizer
from tests.support.frontends import make_frontend, outputs

FIRST, BETWEEN = "quire_time_to_first_token_seconds", "quire_inter_token_latency_seconds"


async def test_a_stream_has_one_first_token_and_gaps_between_the_others() -> None:
    frontend, engine, metrics = make_frontend(Tokenizer(byte_tokenizer()))

    def counts() -> tuple[float | None, ...]:
        names = (f"{FIRST}_count", f"{BETWEEN}_count", "quire_generation_tokens_total")
        return tuple(metrics.registry.get_sample_value(name, {"model_name": "m"}) for name in names)

    for streams, name in enumerate("ab", 1):
        async with frontend.open(Spec("cat"), name, None) as live:
            attempt = engine.submitted()[-1]
            engine.deliver(outputs([(attempt, 0, 70)], starts=[attempt]))
            assert counts() == (streams, 4 * (streams - 1), 5 * (streams - 1) + 1)
            for position in range(1, 5):
                ends = [(attempt, EndReason.LENGTH)] if position == 4 else []
                engine.deliver(outputs([(attempt, position, 70)], ends))
            await live.wait()
            assert counts() == (streams, 4 * streams, 5 * streams)
