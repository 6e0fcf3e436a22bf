"""A frontend over engines that a test kills and brings back."""

from contextlib import AsyncExitStack

from model.inputs.tokenizer import Tokenizer
from rpc.frontend.frontend import Frontend
from rpc.frontend.live import Live
from rpc.frontend.prepare import Preparer
from rpc.frontend.settings import FrontendSettings
from rpc.observe.metrics import Metrics
from scheduler.events import EndReason, Submit
from scheduler.limits import ModelDefaults
from scheduler.spec import Spec
from tests.support.frontends import outputs
from tests.support.links import MortalEngine


class Fleet:
    """A frontend over puppets, which a test kills and brings back."""

    def __init__(self, tokenizer: Tokenizer, engines: int = 2, **settings: float) -> None:
        self.metrics = Metrics("m")
        preparer = Preparer("m", tokenizer, ModelDefaults(eos_token_ids=(0,)))
        self.frontend = Frontend(preparer, FrontendSettings(**settings), self.metrics)
        self.dispatch = self.frontend.dispatch
        self.engines: dict[int, MortalEngine] = {}
        for number in range(engines):
            self.bring(number)

    def bring(self, number: int) -> MortalEngine:
        replica = self.frontend.new_replica(number)
        engine = self.engines[number] = MortalEngine(lambda step: self.dispatch.deliver(step, replica))
        self.frontend.attach(engine, number)
        return engine

    def kill(self, number: int) -> None:
        engine = self.engines.pop(number)
        engine.die("killed")
        self.frontend.detach(number)

    def restart(self, number: int = 0, times: int = 1) -> None:
        for _ in range(times):
            self.kill(number)
            self.bring(number)

    def place_of(self, live: Live) -> int:
        """The engine that has it now."""
        (number,) = [n for n, engine in self.engines.items() if live.attempt in engine.live]
        return number

    def submit_of(self, live: Live) -> Submit:
        """Returns the Submit that its engine got."""
        sent = self.engines[self.place_of(live)].sent
        (submit,) = [e for e in sent if isinstance(e, Submit) and e.attempt == live.attempt]
        return submit

    def tell(
        self, live: Live, *tokens: tuple[int, int], end: EndReason | None = None, start: bool = False, age: float = 0.25
    ) -> None:
        """Its engine gives (position, token)s of its first sequence. age: seconds since its start."""
        attempt = live.attempt
        ends = [(attempt, end)] if end is not None else []
        starts = [attempt] if start else []
        self.engines[self.place_of(live)].tell(outputs([(attempt, *token) for token in tokens], ends, starts, age=age))

    def outcome(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value("quire_requests_total", {"model_name": "m", "outcome": name})


CAT = Spec("cat")


async def opened(stack: AsyncExitStack, fleet: Fleet, count: int, spec: Spec = CAT) -> list[Live]:
    return [await stack.enter_async_context(fleet.frontend.open(spec, f"r{i}", None)) for i in range(count)]
