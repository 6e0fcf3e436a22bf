"""Cache of facts that responses need: models, fingerprints and texts of tokens. They hardly change."""

import asyncio
import hashlib
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol

import grpc
from quire.v1 import model_service_pb2 as model_pb
from quire.v1 import model_service_pb2_grpc as model_pb_grpc
from quire.v1 import tokenization_service_pb2 as pb
from quire.v1 import tokenization_service_pb2_grpc as pb_grpc

from rpc.client.security import Metadata

FRESH = 60.0  # seconds that a list of models is used
MOST_TEXTS = 2**19  # tokens of all models; the largest vocabularies have 2**18
BROKEN = "\ufffd"
AT_ONCE = 8  # texts that one answer asks for at once: other calls wait less
PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # seconds before another try to get a text
PATIENCE = 10.0  # seconds after which no other try begins
BUSY = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class UnaryCaller(Protocol):
    """Makes unary calls; `rpc.gateway.upstream.Upstream` is one."""

    async def ask(self, stub: type, method: str, request: Any, metadata: Metadata) -> Any:
        """Makes one call of a stub's method. Raises grpc.RpcError."""


class ServedModels:
    """Models of the servers, and texts of their tokens. Lives on one asyncio loop.

    Attributes:
        since: Seconds since the epoch at which this object was made; OpenAI's "created" of a model.
    """

    def __init__(self, caller: UnaryCaller) -> None:
        self._caller, self.since = caller, int(time.time())
        self._models: dict[str, model_pb.Model] = {}
        self._known_since = -FRESH
        self._texts: dict[tuple[str | None, int], str] = {}

    async def models(self, metadata: Metadata) -> dict[str, model_pb.Model]:
        """Asks a server, and returns its models by name. Raises grpc.RpcError."""
        request = model_pb.ListModelsRequest()
        answer = await self._caller.ask(model_pb_grpc.ModelServiceStub, "ListModels", request, metadata)
        self._models = {model.name: model for model in answer.models}
        self._known_since = time.monotonic()
        return self._models

    async def model(self, name: str | None, metadata: Metadata) -> tuple[str, str | None]:
        """Returns name and fingerprint for the response to a request that names this model.

        The fingerprint is None if no server reports the model. The request itself then gets the server's error.
        """
        if time.monotonic() - self._known_since > FRESH:
            try:
                await self.models(metadata)
            except grpc.RpcError:
                return name or "", None
        model = self._known(name)
        if model is None:
            return name or "", None
        return model.name, "fp_" + hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()[:12]

    def context(self, name: str | None) -> int | None:
        """Returns the longest prompt + output of this model in tokens; None if no server has reported the model."""
        model = self._known(name)
        return model.max_model_length if model is not None else None

    def _known(self, name: str | None) -> model_pb.Model | None:
        return self._models.get(name or "") or (next(iter(self._models.values()), None) if not name else None)

    async def texts(
        self, ids: Iterable[int], name: str | None, fingerprint: str | None, metadata: Metadata
    ) -> dict[int, str]:
        """Returns each token's text in the middle of a text, with U+FFFD for bytes that are no characters.

        Raises:
            grpc.RpcError: A token's text is not cached, and no server gives it.
        """
        key = fingerprint or name  # a server restarted with another model must not give the texts of the old one
        wanted = set(ids)
        known = {token: self._texts[key, token] for token in wanted if (key, token) in self._texts}
        unknown = [token for token in wanted if token not in known]
        for start in range(0, len(unknown), AT_ONCE):
            asked = unknown[start : start + AT_ONCE]
            found = await _all_of([self._text(token, name, metadata) for token in asked])
            if len(self._texts) + len(asked) > MOST_TEXTS:  # reached only after changes of models
                self._texts.clear()
            self._texts.update(zip(((key, token) for token in asked), found, strict=True))
            known.update(zip(asked, found, strict=True))
        return known

    async def _text(self, token: int, name: str | None, metadata: Metadata) -> str:
        """Returns the second half of the token's text twice: tokenizers can drop the space at the start of a text."""
        twice = await self.detokenize([token, token], name, metadata)
        once = twice[len(twice) // 2 :]
        if BROKEN not in twice and twice in (once + once, once[1:] + once):
            return once
        return await self.detokenize([token], name, metadata)

    async def detokenize(
        self, ids: list[int], name: str | None, metadata: Metadata, skip_special_tokens: bool = False
    ) -> str:
        """Returns the text of token ids of an answer, which a busy server, or a lost one, must not cost.

        Raises:
            grpc.RpcError: No server gives it, some seconds long.
        """
        until = time.monotonic() + PATIENCE
        for pause in PAUSES:
            try:
                return await self._detokenize(ids, name, metadata, skip_special_tokens)
            except grpc.RpcError as error:
                if error.code() not in BUSY or time.monotonic() > until:
                    raise
            await asyncio.sleep(pause)
        return await self._detokenize(ids, name, metadata, skip_special_tokens)

    async def _detokenize(self, ids: list[int], name: str | None, metadata: Metadata, skip_special_tokens: bool) -> str:
        request = pb.DetokenizeRequest(model=name or "", token_ids=ids, skip_special_tokens=skip_special_tokens)
        answer = await self._caller.ask(pb_grpc.TokenizationServiceStub, "Detokenize", request, metadata)
        return str(answer.text)


async def _all_of(calls: Sequence[Coroutine[Any, Any, str]]) -> list[str]:
    """Returns the results of calls. If one fails the others are ended. Raises its exception."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
