"""Answers of POST /v1/completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.v1 import generation_service_pb2 as pb

from rpc.client.security import Metadata
from rpc.gateway.answers import Answer, Piece
from rpc.gateway.completion_schema import CompletionRequest, Prompt
from rpc.gateway.logprobs import CompletionLogprobs, ids_in, joined
from rpc.gateway.parameters import completion_spec
from rpc.gateway.served import Served


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt's text, that its choices begin with. first: its first token, where logprobs are wanted too."""

    text: str
    first: int | None


class Completion(Answer):
    """A prompt of text whose logprobs are to be echoed is sent as its token ids: the server says nothing of the first
    one.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"
    part = (b'"text":', b"")
    asked: CompletionRequest

    def __init__(self, asked: CompletionRequest, served: Served, metadata: Metadata) -> None:
        super().__init__(asked, served, metadata)
        self._echoes: dict[int, Echo] = {}
        self._forms: dict[int, CompletionLogprobs] = {}

    @property
    def calls(self) -> int:
        return len(self.asked.prompt)

    async def _specs(self) -> list[pb.GenerationSpec]:
        return [completion_spec(self.asked, await self._prompt(i, one)) for i, one in enumerate(self.asked.prompt)]

    async def _prompt(self, position: int, prompt: Prompt) -> Prompt:
        """As it is sent."""
        asked, text, first = self.asked, prompt, None
        if asked.echo and asked.logprobs is not None:
            if isinstance(prompt, str):
                prompt = await self._served.tokenize(prompt, asked.model, self._metadata, asked.add_special_tokens)
            first = prompt[0] if prompt else None
        if asked.echo:
            if not isinstance(text, str):
                skip = asked.skip_special_tokens is not False
                text = await self._served.detokenize(text, asked.model, self._metadata, skip)
            self._echoes[position] = Echo(text, first)
        return prompt

    async def take(self, position: int, message: pb.StreamGenerateResponse) -> list[Piece]:
        echo = self._echoes.pop(position, None)
        before = [] if echo is None else await self._echoed(position, echo, message.prompt_info)
        pieces = await super().take(position, message)
        if self.asked.scores_alone:
            pieces = [Piece(piece.choice, "", finish=piece.finish and "length") for piece in pieces]
        return before + pieces

    async def _echoed(self, position: int, echo: Echo, prompt: pb.PromptInfo) -> list[Piece]:
        """What the choices of a prompt begin with."""
        first, pieces = position * self.asked.sequences, []
        for choice in range(first, first + self.asked.sequences):
            logprobs = None
            if echo.first is not None:
                texts = await self._texts({echo.first, *ids_in(prompt.logprobs)})
                logprobs = self._form(choice).add(prompt.logprobs[1:], texts, echo.first)
            pieces.append(Piece(choice, echo.text, logprobs))
        return pieces

    def _form(self, choice: int) -> CompletionLogprobs:
        return self._forms.setdefault(choice, CompletionLogprobs(self.asked.logprobs or 0))

    async def _logprobs(self, choice: int, positions: Sequence[pb.TokenLogprobs]) -> dict[str, Any] | None:
        if self.asked.scores_alone:
            return None
        return self._form(choice).add(positions, await self._texts(ids_in(positions)))

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if self.asked.scores_alone:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        logprobs = joined([piece.logprobs for piece in pieces if piece.logprobs])
        return {"text": "".join(piece.text for piece in pieces), "logprobs": logprobs}
