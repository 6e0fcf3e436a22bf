"""From a `Spec` to a `Request`: tokenizes and validates, in worker threads, since both can take a while."""

import secrets
from dataclasses import dataclass

from model.inputs.tokenizer import Tokenizer
from rpc.frontend.errors import RequestFailed, invalid
from scheduler.request import InvalidRequest, Limits, ModelDefaults, Request, Spec, check_text, resolve


@dataclass(frozen=True, slots=True)
class Preparer:
    """name: of the served model. limits: of the engines behind this frontend."""

    name: str
    tokenizer: Tokenizer
    limits: Limits
    defaults: ModelDefaults

    def prepare(self, spec: Spec) -> Request:
        """Raises RequestFailed: NOT_FOUND for another model's name, INVALID_ARGUMENT for a value that cannot be
        served.
        """
        if spec.model not in ("", self.name):
            message = f"model {spec.model[:100]!r} is not served here, {self.name!r} is"
            raise RequestFailed("NOT_FOUND", "MODEL_NOT_FOUND", message, field=spec.model)
        try:
            if isinstance(spec.prompt, str):
                check_text(spec.prompt, self.limits)
                ids = self.tokenizer.encode(spec.prompt, spec.add_special_tokens)
            else:
                ids = list(spec.prompt)
            return resolve(spec, ids, self.limits, self.defaults, minted_seed=secrets.randbits(64))
        except InvalidRequest as error:
            raise invalid(error) from None
