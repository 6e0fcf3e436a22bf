"""A line of a batch job, whatever its form."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from quire.v1 import generation_service_pb2 as pb

from rpc.frontend.errors import RequestFailed
from rpc.gateway.served import Served

OPENAI_KEYS = ("custom_id", "method", "url", "body")
"""Keys of a line of OpenAI's Batch API, none of which a line of Quire's own form has."""
CALL_FAILED = "CALL_FAILED"
"""Reason of a failure of which gRPC says more than the server."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a line.

    Attributes:
        text: The output's line: JSON without its end.
        failed: Whether the line has an error in place of a result.
        prompt_tokens: Prompt tokens of a result.
        completion_tokens: Generated tokens of a result.
    """

    text: str
    failed: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Answering(Protocol):
    """Answers the requests of lines."""

    @property
    def served(self) -> Served:
        """Names, fingerprints and tokens of the models that answer."""

    async def run(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        """Tries until there is an answer. Raises RequestFailed for one that will not change, JobStoppedError."""


@dataclass(frozen=True, slots=True)
class Line(ABC):
    """A line that is not blank.

    Attributes:
        index: Number among such lines, from 0.
        number: Number in the file, from 1.
        id: The line's name in the output; its number in the file where it has none.
    """

    index: int
    number: int
    id: str | int

    @abstractmethod
    async def run(self, answering: Answering) -> Outcome:
        """Answers the line. Raises RequestFailed, JobStoppedError."""

    @abstractmethod
    def failed(self, failure: RequestFailed) -> str:
        """Returns the output's line of a failure: JSON without its end."""
