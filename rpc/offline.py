"""The engine without a server: `LLM(model).generate(prompts)` in this process, for scripts and notebooks."""

import itertools
import json
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from cache_manager.settings import CacheSettings
from model.settings import ModelSettings
from rpc.assembly import assemble
from rpc.frontend.errors import RequestFailed, invalid
from rpc.frontend.output import Finish, SequenceOutput, StepTokens, TokenLogprob
from rpc.frontend.prepare import load_preparer
from rpc.frontend.stream import RequestStream
from rpc.image_files import ImageFile, read_image
from rpc.settings import EngineConfig
from scheduler.events import Finish as FinishAttempt
from scheduler.events import StepOutputs, Submit
from scheduler.request import Chat, ChatMessage, ImageHere, InvalidRequest, Output, Sampling, Spec, Stopping
from scheduler.settings import NO_QUEUE_LIMITS, SchedulerSettings


@dataclass(frozen=True, slots=True)
class Generated:
    """One output. logprobs: by token, if asked for: the chosen first, then alternatives by rank. score: the sum of its
    tokens' logprobs; of a beam search over length ^ penalty, by which its results are ordered.
    """

    text: str
    token_ids: list[int]
    finish: Finish
    logprobs: list[list[TokenLogprob]]
    score: float


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of one prompt: as many sequences as were asked for, the first of which can be read here.

    prompt_logprobs: as logprobs, of the prompt, [] for its first token. cached_tokens: prompt tokens whose KV was there
    from an earlier prompt.
    """

    sequences: tuple[Generated, ...]
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: list[list[TokenLogprob]]

    @property
    def text(self) -> str:
        return self.sequences[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.sequences[0].token_ids

    @property
    def finish(self) -> Finish:
        return self.sequences[0].finish

    @property
    def logprobs(self) -> list[list[TokenLogprob]]:
        return self.sequences[0].logprobs

    @property
    def score(self) -> float:
        return self.sequences[0].score


class LLM:
    """A model, its KV pool and its engine. Close it, or use it as a context manager.

    model: a directory, a hub name, or "demo". Raises CheckpointError, ValueError for what cannot be served.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        dtype: str = "auto",
        device: str = "auto",
        page_size: int = 16,
        kv_cache_memory: int | None = None,
        max_batched_tokens: int = 512,
        max_sequences: int = 256,
        prefix_cache: bool = True,
        kv_cache_dtype: str = "auto",
        host_cache_memory: int | None = None,
        recompute: bool = False,
        quantization: str | None = None,
        backend: str = "auto",
        tensor_parallel: int = 1,
    ) -> None:
        config = EngineConfig(
            model=ModelSettings(
                model,
                None,
                dtype,
                device,
                page_size,
                kv_cache_memory,
                kv_cache_dtype=kv_cache_dtype,
                host_cache_memory=host_cache_memory,
                quantization=quantization,
                backend=backend,
                tensor_parallel=tensor_parallel,
            ),
            scheduler=SchedulerSettings(max_batched_tokens, max_sequences, recompute=recompute),
            queue=NO_QUEUE_LIMITS,
            cache=CacheSettings(prefix_cache),
        )
        parts = assemble(config)
        self._preparer = load_preparer(config.model)
        self._outputs: queue.SimpleQueue[StepOutputs] = queue.SimpleQueue()
        self._attempts = itertools.count(1)
        self._engine = parts.engine(self._outputs.put)
        self._one_at_a_time = threading.Lock()
        self._closed = False
        self._engine.start()

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling: Sampling | None = None,
        stopping: Stopping | None = None,
        output: Output | None = None,
        images: Sequence[ImageFile] | Sequence[Sequence[ImageFile]] | None = None,
    ) -> list[Completion]:
        """Runs the prompts (texts or token ids) together; results stand in their order. Other threads' calls wait.

        images: PNG or JPEG files, as bytes or paths: a list for each prompt, or one for the only text.
        Raises RequestFailed, before anything runs, if one of them cannot be served; RuntimeError after `close`;
        OSError, ValueError for files that cannot be read; ValueError for another number of lists than of prompts.
        """
        lists: Sequence[Any]
        if isinstance(prompts, str):
            prompts, lists = [prompts], [images or ()]
        else:
            lists = [()] * len(prompts) if images is None else images
        if len(lists) != len(prompts):
            raise ValueError(f"{len(lists)} lists of images for {len(prompts)} prompts")
        given = [
            (p if isinstance(p, str) else tuple(p), tuple(map(read_image, files)))
            for p, files in zip(prompts, lists, strict=True)
        ]
        return self._run(given, sampling, stopping, output)

    def chat(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        sampling: Sampling | None = None,
        stopping: Stopping | None = None,
        output: Output | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """The next message of each conversation, lists of {"role": ..., "content": ...}; else as `generate`. A content
        is a text or a list of {"type": "text", "text": ...} and {"type": "image", "image": bytes or path}.

        template_arguments: of the model's chat template. Raises KeyError for a message without role or content too.
        """
        arguments = tuple((name, json.dumps(value)) for name, value in (template_arguments or {}).items())
        try:
            chats = [
                (Chat(tuple(ChatMessage(m["role"], _content(m["content"])) for m in c), arguments), _images(c))
                for c in conversations
            ]
        except InvalidRequest as error:
            raise invalid(error) from None
        return self._run(chats, sampling, stopping, output)

    def _run(
        self,
        prompts: Sequence[tuple[str | tuple[int, ...] | Chat, tuple[bytes, ...]]],
        sampling: Sampling | None,
        stopping: Stopping | None,
        output: Output | None,
    ) -> list[Completion]:
        with self._one_at_a_time:
            if self._closed:
                raise RuntimeError("this LLM is closed")
            return self._generate(
                [
                    Spec(
                        prompt,
                        images,
                        sampling=sampling or Sampling(),
                        stopping=stopping or Stopping(),
                        output=output or Output(),
                    )
                    for prompt, images in prompts
                ]
            )

    def _generate(self, specs: Sequence[Spec]) -> list[Completion]:
        streams: dict[int, RequestStream] = {}
        for spec in specs:
            attempt = next(self._attempts)
            streams[attempt] = RequestStream(
                spec, self._preparer.prepare(spec, self._engine.info.limits), self._preparer.tokenizer
            )
        self._engine.send([Submit(attempt, stream.request) for attempt, stream in streams.items()])
        running = dict(streams)
        try:
            while running:
                self._take(self._outputs.get(), running)
        finally:
            self._engine.send([FinishAttempt(attempt) for attempt in running])
        return [_completion(stream) for stream in streams.values()]

    def _take(self, outputs: StepOutputs, running: dict[int, RequestStream]) -> None:
        for start in outputs.starts:
            if start.attempt in running:
                running[start.attempt].cached_tokens = start.cached
        for part in outputs.prompt_parts:
            if part.attempt in running:
                running[part.attempt].accept_prompt(part)
        step = StepTokens.of(outputs)
        for i, attempt in enumerate(step.attempts):
            stream = running.get(attempt)
            if stream is not None and stream.accept(step, i):
                self._engine.send([FinishAttempt(attempt, step.indices[i])])
                if stream.ended:
                    del running[attempt]
        for end in outputs.ends:
            stream = running.get(end.attempt)
            if stream is not None:
                stream.end(end)
                if stream.ended:
                    del running[end.attempt]

    def close(self) -> None:
        """Stops the engine, after a call that is running. A second call does nothing."""
        with self._one_at_a_time:
            self._closed = True
            self._engine.stop()
            self._preparer.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _content(content: Any) -> Any:
    """As `ChatMessage` has it; what is no content goes there to be refused."""
    if not isinstance(content, list | tuple):
        return content
    return tuple(ImageHere() if part["type"] == "image" else part["text"] for part in content)


def _images(messages: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
    parts = (part for m in messages if isinstance(m["content"], list | tuple) for part in m["content"])
    return tuple(read_image(part["image"]) for part in parts if part["type"] == "image")


def _completion(stream: RequestStream) -> Completion:
    if stream.failure is not None:
        raise stream.failure
    sequences = tuple(_generated(sequence) for sequence in stream.sequences)
    return Completion(sequences, len(stream.request.prompt), stream.cached_tokens, stream.prompt_logprobs)


def _generated(sequence: SequenceOutput) -> Generated:
    if sequence.finish is None:
        raise RequestFailed("INTERNAL", "NOT_ENDED", "the engine sent no end")
    delta = sequence.take()
    return Generated(delta.text, delta.token_ids, sequence.finish, delta.logprobs, sequence.score)
