"""Client of a load over OpenAI's HTTP API: streamed completions of vLLM, llama.cpp, `quire gateway` and others.

A chunk with text is a message. The last chunk has the number of tokens (`include_usage`); without it, chunks count as
tokens. Prompts are ids of the caller's tokenizer, or text of about the right length, since the API has no tokenizer.
"""

import json
import ssl
import time
from typing import Any

import httpx

from model.inputs.tokenizer import Tokenizer
from rpc.client.security import Security
from rpc.loadgen.corpus import Corpus, corpus_of_words
from rpc.loadgen.observation import Observation
from rpc.loadgen.wire import Failed, LoadRequest, ServedModel

CONTEXTS = ("max_model_len", "context_length")
"""Names under which servers list a model's context."""


class OpenAI:
    """Client over OpenAI's API, with a kept connection for each running request.

    Args:
        base: http://HOST:PORT/v1.
        model: Name of the model; "" takes the first of the server's list.
        security: Token and certificates.
        ignore_eos: Whether to ask for output past the model's end.
        tokenizer: The model's tokenizer, for prompts of ids; None makes prompts of text.
    """

    def __init__(
        self, base: str, model: str, security: Security, ignore_eos: bool, tokenizer: Tokenizer | None
    ) -> None:
        self._base, self._model, self._ignore_eos, self._tokenizer = base.rstrip("/"), model, ignore_eos, tokenizer
        self._http = httpx.AsyncClient(
            headers={**dict(security.metadata), "accept-encoding": "identity"},
            verify=_trust(security),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=60),
            timeout=httpx.Timeout(None, connect=10),
            trust_env=False,
        )

    async def find(self) -> ServedModel:
        try:
            answer = await self._http.get(f"{self._base}/models")
            if answer.status_code != 200:
                raise _refused(answer.status_code, answer.content)
            models = [entry for entry in answer.json()["data"] if self._model in ("", entry["id"])]
        except (httpx.HTTPError, OSError) as error:
            raise self._lost(error) from None
        except (ValueError, KeyError, TypeError):
            raise Failed("BAD_ANSWER", f"{self._base}/models is no list of models") from None
        if not models:
            raise Failed("NOT_FOUND", f"{self._base} does not serve --model {self._model}")
        self._model = str(models[0]["id"])
        context = next((models[0][name] for name in CONTEXTS if isinstance(models[0].get(name), int)), None)
        return ServedModel(self._model, context)

    async def corpus(self, text: str) -> Corpus:
        if self._tokenizer is not None:
            return Corpus(self._tokenizer.encode(text, add_special_tokens=False))

        async def count(prompt: str) -> int:
            seen = Observation(0.0, (0, 1))
            await self.send(LoadRequest(0, prompt, 0, 1), seen)
            return seen.prompt_tokens

        return await corpus_of_words(text, count)

    async def send(self, request: LoadRequest, seen: Observation) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.output,
            "seed": request.number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        content = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        seen.sent = time.monotonic()
        try:
            async with self._http.stream(
                "POST", f"{self._base}/completions", content=content, headers=headers
            ) as answer:
                if answer.status_code != 200:
                    raise _refused(answer.status_code, await answer.aread())
                await self._read(answer, seen)
        except (httpx.HTTPError, OSError) as error:
            raise self._lost(error) from None

    async def _read(self, answer: httpx.Response, seen: Observation) -> None:
        """Records server-sent events until [DONE]. Raises Failed without it."""
        rest = b""
        async for data in answer.aiter_raw():
            now = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                event = line[5:].strip()
                if event == b"[DONE]":
                    return
                record_chunk(event, now, seen)
        raise Failed("CUT_OFF", "the stream ended without [DONE]")

    def _lost(self, error: Exception) -> Failed:
        return Failed(type(error).__name__, f"{self._base}: {error}")

    async def close(self) -> None:
        await self._http.aclose()


def record_chunk(event: bytes, now: float, seen: Observation) -> None:
    """Records one chunk. A chunk with text counts as a token, until the server reports the count. Raises Failed."""
    try:
        chunk = json.loads(event)
        choices, usage, error = chunk.get("choices") or [], chunk.get("usage"), chunk.get("error")
        text = choices[0].get("text") if choices else ""
        finish = _end_of(choices[0]) if choices else None
        tokens = (int(usage["prompt_tokens"]), int(usage["completion_tokens"])) if usage else None
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") if usage else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Failed("BAD_ANSWER", f"an event is no chunk of a completion: {event[:200]!r}") from None
    if error:
        raise Failed(*_code_and_message(error, "error"))
    if text:
        seen.times.append(now)
        seen.tokens += 1
    if finish:
        seen.finish = str(finish).lower()
    if tokens is not None:
        seen.prompt_tokens, seen.tokens = tokens
    if isinstance(cached, int):
        seen.cached_tokens = cached


def _end_of(choice: dict[str, Any]) -> Any:
    """Returns the finish reason. `quire gateway` has causes that OpenAI lacks in `stop_reason`."""
    finish, why = choice.get("finish_reason"), choice.get("stop_reason")
    return why if finish == "length" and why in ("deadline", "abort") else finish


def _refused(status: int, content: bytes) -> Failed:
    code = f"HTTP {status}"
    try:
        return Failed(code, _code_and_message(json.loads(content)["error"], "")[1])
    except (ValueError, KeyError, TypeError, RecursionError):
        return Failed(code, content[:200].decode(errors="replace"))


def _code_and_message(error: Any, code: str) -> tuple[str, str]:
    """Returns code and message of OpenAI's error object, or of the value that a server has in its place."""
    if not isinstance(error, dict):
        return code, str(error)[:500]
    return str(error.get("code") or error.get("type") or code), str(error.get("message"))[:500]


def _trust(security: Security) -> ssl.SSLContext | bool:
    """Returns httpx's `verify`: the authorities of `security`, or its default ones."""
    if security.roots is None:
        return True
    return ssl.create_default_context(cadata=security.roots.decode("ascii"))
