"""From a `Spec` to a `Request`: tokenizes and validates, in worker threads, since both can take a while."""

import secrets
from dataclasses import dataclass

from model.config import read_config, read_defaults
from model.inputs.tokenizer import Tokenizer
from model.settings import ModelSettings
from rpc.frontend.errors import RequestFailed, invalid
from rpc.paths import model_directory, model_name
from scheduler.request import InvalidRequest, Limits, ModelDefaults, Request, Spec, check_text, resolve


@dataclass(frozen=True, slots=True)
class Preparer:
    """name: of the served model."""

    name: str
    tokenizer: Tokenizer
    defaults: ModelDefaults

    def prepare(self, spec: Spec, limits: Limits) -> Request:
        """limits: of the engine that will get it. Raises RequestFailed: NOT_FOUND for another model's name,
        INVALID_ARGUMENT for a value that cannot be served.
        """
        if spec.model not in ("", self.name):
            message = f"model {spec.model[:100]!r} is not served here, {self.name!r} is"
            raise RequestFailed("NOT_FOUND", "MODEL_NOT_FOUND", message, field=spec.model)
        try:
            if isinstance(spec.prompt, str):
                check_text(spec.prompt, limits)
                ids = self.tokenizer.encode(spec.prompt, spec.add_special_tokens)
            else:
                ids = list(spec.prompt)
            return resolve(spec, ids, limits, self.defaults, minted_seed=secrets.randbits(64))
        except InvalidRequest as error:
            raise invalid(error) from None


def load_preparer(settings: ModelSettings) -> Preparer:
    """The frontend's share of a model. Raises CheckpointError."""
    directory = model_directory(settings.model)
    defaults = read_defaults(directory, read_config(directory))
    name = settings.served_model_name or model_name(settings.model, directory)
    return Preparer(name, Tokenizer.load(directory), defaults)
