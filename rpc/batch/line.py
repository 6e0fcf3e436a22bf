"""A line of a batch job: the interface that both forms implement."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from quire.v1 import generation_service_pb2 as pb

from rpc.frontend.errors import RequestFailed
from rpc.gateway.served import ServedModels

OPENAI_KEYS = ("custom_id", "method", "url", "body")
"""Keys of a line of OpenAI's Batch API. A line of Quire's own form has none of them."""
CALL_FAILED = "CALL_FAILED"
"""Reason of a failed call for which the server gave no reason."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a line: its result or its error.

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
    def served(self) -> ServedModels:
        """Names, fingerprints and tokens of the models that answer."""

    async def run(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        """Tries until there is a response.

        Raises:
            RequestFailed: The request failed, and another try cannot help.
            JobStoppedError: The job cannot go on now.
        """


@dataclass(frozen=True, slots=True)
class Line(ABC):
    """A line that is not blank.

    Attributes:
        index: Number among such lines, from 0.
        number: Number in the file, from 1.
        id: Id in the output; the number in the file if the line has no id.
    """

    index: int
    number: int
    id: str | int

    @abstractmethod
    async def run(self, answering: Answering) -> Outcome:
        """Runs the line. Raises RequestFailed, JobStoppedError."""

    @abstractmethod
    def failed(self, failure: RequestFailed) -> str:
        """Returns the output's line of a failure: JSON without its end."""
