"""Responses of POST /v1/completions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.v1 import generation_service_pb2 as pb

from rpc.client.security import Metadata
from rpc.gateway.answers import ApiResponse, Extra, Piece
from rpc.gateway.completion_schema import CompletionRequest
from rpc.gateway.logprobs import CompletionLogprobs, ids_in, in_turns, joined
from rpc.gateway.parameters import completion_spec
from rpc.gateway.served import ServedModels


class CompletionResponse(ApiResponse):
    """Response of completions: a choice for each sequence of each prompt. With `echo` it begins with the prompt."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"
    part = (b'"text":', b"")
    prompt_in_choices = True
    asked: CompletionRequest

    def __init__(self, asked: CompletionRequest, served: ServedModels, metadata: Metadata) -> None:
        super().__init__(asked, served, metadata)
        self._echoes = set(range(len(asked.prompt))) if asked.echo else set[int]()
        self._forms: dict[int, CompletionLogprobs] = {}

    @property
    def calls(self) -> int:
        return len(self.asked.prompt)

    def _specs(self) -> list[pb.GenerationSpec]:
        return [completion_spec(self.asked, prompt) for prompt in self.asked.prompt]

    async def pieces_of(self, position: int, message: pb.StreamGenerateResponse) -> list[Piece]:
        echoes = position in self._echoes
        self._echoes.discard(position)
        before = await self._echoed(position, message.prompt_info) if echoes else []
        pieces = await super().pieces_of(position, message)
        if self.asked.scores_alone:
            pieces = [replace(piece, text="", finish=piece.finish and "length", stop=None) for piece in pieces]
        return before + pieces

    async def _echoed(self, position: int, prompt: pb.PromptInfo) -> list[Piece]:
        """Returns the echo of a prompt as the first piece of each of its choices. Raises grpc.RpcError."""
        asked, text = self.asked, self.asked.prompt[position]
        if not isinstance(text, str) or asked.truncate_prompt_tokens is not None:
            skip = asked.skip_special_tokens is not False
            text = await self._served.detokenize(list(prompt.token_ids), asked.model, self._metadata, skip)
        choices = range(position * asked.sequences, (position + 1) * asked.sequences)
        made: dict[int, list[dict[str, Any]]] = {choice: [] for choice in choices}
        if asked.logprobs is not None:
            begin = prompt.token_ids[0]
            texts = await self._texts([begin])
            for choice in choices:
                made[choice].append(self._form(choice).add((), texts, begin))
            async for part in in_turns(prompt.logprobs[1:]):
                texts = await self._texts(ids_in(part))
                for choice in choices:
                    made[choice].append(self._form(choice).add(part, texts))
        return [
            Piece(choice, text, joined(made[choice]), extra=self._extra(prompt, choice, (), 0)) for choice in choices
        ]

    def _extra(self, prompt: pb.PromptInfo, choice: int, token_ids: Sequence[int], count: int) -> Extra | None:
        if self.asked.scores_alone:
            token_ids, count = (), 0
        return super()._extra(prompt, choice, token_ids, count)

    def _form(self, choice: int) -> CompletionLogprobs:
        return self._forms.setdefault(choice, CompletionLogprobs(self.asked.logprobs or 0))

    async def _logprobs(self, choice: int, positions: Sequence[pb.TokenLogprobs]) -> dict[str, Any] | None:
        if self.asked.scores_alone or self.asked.logprobs is None:
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
