"""`LLM`: a model and its engine in the caller's process."""

import itertools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from cache_manager.settings import CacheSettings
from model.inputs.grammar_backends import LLGUIDANCE, check_backend
from model.sampling.logits_processors import LogitsProcessorFactory
from model.settings import ModelSettings
from rpc.engines.assembly import assemble
from rpc.frontend.errors import RequestFailed, invalid
from rpc.frontend.output import StepTokens
from rpc.frontend.prepare import load_preparer
from rpc.frontend.stream import RequestStream
from rpc.offline.forks import ORIGIN
from rpc.offline.keywords import CHAT_KEYWORDS, CONSTRUCTOR_KEYWORDS, GENERATE_KEYWORDS
from rpc.offline.progress import Advance, progress_bar
from rpc.offline.prompts import (
    Images,
    Prompt,
    ReadPrompt,
    is_one_conversation,
    is_one_prompt,
    read_conversation,
    read_prompt,
    read_tools,
)
from rpc.offline.results import Completion, PromptsFailed, completion_of
from rpc.offline.tokenizer import TextTokenizer
from rpc.settings import EngineConfig
from scheduler.events import Abort, StepOutputs, Submit
from scheduler.invalid import InvalidRequest
from scheduler.keywords import explain_keywords
from scheduler.parameters import Output, Sampling, Stopping
from scheduler.settings import NO_QUEUE_LIMITS, SchedulerSettings
from scheduler.spec import Spec
from scheduler.structured import Structured

T = TypeVar("T")
Reader = Callable[[], ReadPrompt]
Message = Mapping[str, Any]


class LLM:
    """A model, its KV pool and its engine. Close it, or use it as a context manager.

    Does not survive `fork`: calls in a child process raise RuntimeError. Calls of several threads run one at a time.

    Args:
        model: A directory, a GGUF file, a hub name, or "demo".
        dtype: Type of weights and KV: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        device: "auto", "cpu" or "cuda".
        page_size: Tokens of a KV page.
        kv_cache_memory: Bytes of the KV pool; None takes half of the free memory, on a GPU what
            `gpu_memory_utilization` leaves, or less if `max_sequences` of the model's whole context need less.
        gpu_memory_utilization: Part of a GPU's memory that the engine may use: weights, steps, KV pool.
        max_batched_tokens: Tokens that one step computes at most; None takes 512 on a CPU, and on a GPU 2,048 to 8,192,
            by its memory.
        max_sequences: Sequences that run at once.
        prefix_cache: Whether prompts share the KV of common prefixes.
        kv_cache_dtype: Type of keys and values; "auto" takes that of `dtype`.
        host_cache_memory: Bytes of host memory for copies of cached KV pages that leave the pool; None keeps none.
        recompute: Whether each step computes every token of a sequence again, for comparisons.
        quantization: "int8" or "int4" keeps the weights of linear layers in 8 or 4 bits; None leaves them.
        backend: Attention backend and kernels: "auto", "cpu", "triton", "flashinfer" or "reference".
        tensor_parallel: Processes that share the model.
        speculative_tokens: Most draft tokens of a sequence in a step, guessed from its own text; output stays the same.
        logits_processors: Each is called with a sequence's prompt, int32 [tokens], and returns its
            `LogitsProcessor`, or None. They change logits in this order, before temperature; beam search is refused
            beside them. A request's `Sampling(logits_processors_args=...)` has keyword arguments for these calls. One
            with a method `ready` may hold requests back, see `model.sampling.logits_processors`.
        structured_output_backend: Library that keeps constraints on outputs: "llguidance" or "xgrammar".

    Raises:
        CheckpointError: The model cannot be loaded.
        ValueError: A value that cannot be served.
        TypeError: An unknown argument. For one of vLLM's the message has Quire's form.
    """

    @explain_keywords("LLM()", CONSTRUCTOR_KEYWORDS)
    def __init__(
        self,
        model: str = "demo",
        *,
        dtype: str = "auto",
        device: str = "auto",
        page_size: int = 16,
        kv_cache_memory: int | None = None,
        gpu_memory_utilization: float = 0.9,
        max_batched_tokens: int | None = None,
        max_sequences: int = 256,
        prefix_cache: bool = True,
        kv_cache_dtype: str = "auto",
        host_cache_memory: int | None = None,
        recompute: bool = False,
        quantization: str | None = None,
        backend: str = "auto",
        tensor_parallel: int = 1,
        speculative_tokens: int = 0,
        logits_processors: Sequence[LogitsProcessorFactory] = (),
        structured_output_backend: str = LLGUIDANCE,
    ) -> None:
        check_backend(structured_output_backend)
        ORIGIN.claim()
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
                gpu_memory_utilization=gpu_memory_utilization,
            ),
            scheduler=SchedulerSettings(
                max_batched_tokens, max_sequences, draft_tokens=speculative_tokens, recompute=recompute
            ),
            queue=NO_QUEUE_LIMITS,
            cache=CacheSettings(prefix_cache),
        )
        parts = assemble(config, factories=logits_processors)
        self._outputs: queue.SimpleQueue[StepOutputs] = queue.SimpleQueue()
        self._attempts = itertools.count(1)
        try:
            self._preparer = load_preparer(config.model, structured_output_backend=structured_output_backend)
            # A Ctrl-C may interrupt this thread, and must not do so within the scheduler.
            self._engine = parts.engine(self._outputs.put, senders_help=False)
        except BaseException:
            parts.close()
            raise
        self._one_at_a_time = threading.Lock()
        self._closed = False
        self._engine.start()

    @explain_keywords("LLM.generate()", GENERATE_KEYWORDS)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        stopping: Stopping | Sequence[Stopping] | None = None,
        output: Output | Sequence[Output] | None = None,
        images: Images | Sequence[Images] | None = None,
        *,
        structured: Structured | Sequence[Structured | None] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[Completion]:
        """Runs the prompts together, and returns results in their order. Other threads' calls wait.

        All prompts are checked before any is run, as vLLM does while it adds them: a job of hours does not end with
        the first typing mistake, and one error names all bad prompts. If a prompt fails while it runs, the others run
        to their end, and the error has their results.

        Args:
            prompts: One prompt or a list. A prompt is text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}
                with "multi_modal_data": {"image": file or files} and "cache_salt".
            sampling: Settings of all prompts, or a list with one for each.
            stopping: Conditions of all prompts, or a list with one for each.
            output: Outputs of all prompts, or a list with one for each.
            images: PNG or JPEG files, as bytes or paths: a list for each prompt, or one for the only prompt.
            structured: Constraint on all outputs, or a list with one for each prompt, None for none.
            use_tqdm: Shows a progress bar on standard error. None shows one if that is a terminal.

        Raises:
            RequestFailed: A prompt that stands in no list failed.
            PromptsFailed: Prompts of a list failed; has their failures and the others' results.
            OSError: An image file of a prompt that stands in no list cannot be read.
            ValueError: An image file of such a prompt has a wrong form, or a list is not as long as that of the
                prompts.
            RuntimeError: After `close`, or in a process that was forked.
        """
        one = is_one_prompt(prompts)
        listed: list[Any] = [prompts] if one else list(prompts)
        files: list[Any] = [images or ()] if one else [()] * len(listed) if images is None else list(images)
        if len(files) != len(listed):
            raise ValueError(f"{len(files)} lists of images for {len(listed)} prompts")
        readers = [lambda p=p, f=f: read_prompt(p, f) for p, f in zip(listed, files, strict=True)]
        return self._run("prompts", one, readers, sampling, stopping, output, structured, use_tqdm)

    @explain_keywords("LLM.chat()", CHAT_KEYWORDS)
    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        stopping: Stopping | Sequence[Stopping] | None = None,
        output: Output | Sequence[Output] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str = "auto",
        tool_name: str = "",
        structured: Structured | Sequence[Structured | None] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[Completion]:
        """Generates the next message of each conversation; otherwise as `generate`.

        Args:
            conversations: One or a list. A conversation is a list of {"role": ..., "content": ...}. A content is a text
                or a list of {"type": "text", "text": ...} and {"type": "image", "image": bytes or path}.
            sampling: Settings of all conversations, or a list with one for each.
            stopping: Conditions of all conversations, or a list with one for each.
            output: Outputs of all conversations, or a list with one for each.
            template_arguments: Variables of the model's chat template.
            add_generation_prompt: Whether the template begins the model's next message.
            continue_final_message: Whether the output goes on from the text of the last message. Excludes
                `add_generation_prompt`.
            tools: Functions that the model may call, {"name": ..., "description": ..., "parameters": JSON schema,
                "strict": ...} each, or in OpenAI's form. A result has `tool_calls`.
            tool_choice: Whether it calls some: "auto", "none" or "required".
            tool_name: Name of the only function that it calls, where some are required; "" for any.
            structured: Constraint on all outputs, or a list with one for each conversation, None for none.
            use_tqdm: Shows a progress bar on standard error. None shows one if that is a terminal.
        """
        how = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tool_use": read_tools(tools, tool_choice, tool_name),
        }
        listed, arguments = list[Any](conversations), template_arguments or {}
        one = is_one_conversation(listed)
        listed = [listed] if one else listed
        readers = [lambda c=c: read_conversation(c, arguments, **how) for c in listed]
        return self._run("conversations", one, readers, sampling, stopping, output, structured, use_tqdm)

    def get_tokenizer(self) -> TextTokenizer:
        """The model's tokenizer: `encode` and `decode`."""
        return TextTokenizer(self._preparer.tokenizer)

    def _run(
        self,
        kind: str,
        one: bool,
        readers: Sequence[Reader],
        sampling: Sampling | Sequence[Sampling] | None,
        stopping: Stopping | Sequence[Stopping] | None,
        output: Output | Sequence[Output] | None,
        structured: Structured | Sequence[Structured | None] | None,
        use_tqdm: bool | None,
    ) -> list[Completion]:
        """Reads and checks all prompts, runs them together, and returns their results.

        Args:
            kind: "prompts" or "conversations", for errors.
            one: Whether the caller passed a single prompt that stands in no list.
            readers: Read a prompt each; they raise as `read_prompt`.
            sampling: See `generate`.
            stopping: See `generate`.
            output: See `generate`.
            structured: See `generate`.
            use_tqdm: See `generate`.
        """
        ORIGIN.check()  # before the lock, which another thread may have held at the fork
        count = len(readers)
        requests = zip(
            readers,
            _for_each(sampling, Sampling, "sampling", count, Sampling()),
            _for_each(stopping, Stopping, "stopping", count, Stopping()),
            _for_each(output, Output, "output", count, Output()),
            _for_each(structured, Structured, "structured", count, None),
            strict=True,
        )
        with self._one_at_a_time:  # one queue has the outputs of all attempts
            if self._closed:
                raise RuntimeError("this LLM is closed")
            streams, failures = list[RequestStream](), dict[int, Exception]()
            for place, (read, how, until, what, constraint) in enumerate(requests):
                try:
                    streams.append(self._stream(read, how, until, what, constraint))
                except (RequestFailed, OSError, ValueError) as failure:
                    failures[place] = failure
            if failures:
                raise failures[0] if one else PromptsFailed(kind, count, failures, {})
            with progress_bar(count, use_tqdm) as advance:
                self._generate(streams, advance)
        return _results(kind, one, streams)

    def _stream(
        self, read: Reader, sampling: Sampling, stopping: Stopping, output: Output, structured: Structured | None
    ) -> RequestStream:
        """Reads and checks one prompt.

        Raises:
            RequestFailed: A value that cannot be served.
            OSError: An image file cannot be read.
            ValueError: An image file has a wrong form.
        """
        try:
            prompt = read()
            spec = Spec(
                prompt.prompt,
                prompt.images,
                sampling=sampling,
                stopping=stopping,
                output=output,
                cache_salt=prompt.cache_salt,
                structured=structured,
            )
        except InvalidRequest as error:
            raise invalid(error) from None
        preparer = self._preparer
        request = preparer.prepare(spec, self._engine.info.limits)
        tokenizer, outputs = preparer.tokenizer, preparer.outputs
        parsings = outputs.parsings(spec, request, tokenizer)
        return RequestStream(spec, request, tokenizer, parsings, outputs.completeness(spec, request, tokenizer))

    def _generate(self, streams: Sequence[RequestStream], advance: Advance) -> None:
        """Runs requests until all have ended."""
        running = {next(self._attempts): stream for stream in streams}
        self._engine.send([Submit(attempt, stream.request) for attempt, stream in running.items()])
        try:
            while running:
                new = self._deliver(self._outputs.get(), running)
                advance(len(streams) - len(running), new)
        finally:  # after an exception, such as KeyboardInterrupt, the rest must not go on
            self._engine.send([Abort(attempt) for attempt in running])

    def _deliver(self, outputs: StepOutputs, running: dict[int, RequestStream]) -> int:
        """Gives a step's outputs to their requests, and drops requests that ended.

        Returns:
            Number of new tokens.
        """
        for start in outputs.starts:
            if start.attempt in running:
                running[start.attempt].cached_tokens = start.cached
        for part in outputs.prompt_parts:
            if part.attempt in running:
                running[part.attempt].accept_prompt(part)
        step = StepTokens.from_outputs(outputs)
        for i, attempt in enumerate(step.attempts):
            stream = running.get(attempt)
            if stream is not None and (stream.accept(step, i) or self._settle(stream, step.indices[i])):
                self._engine.send([Abort(attempt, None if stream.ended else step.indices[i])])
                if stream.ended:
                    del running[attempt]
        for end in outputs.ends:
            stream = running.get(end.attempt)
            if stream is not None:
                stream.end(end)
                if self._settle(stream, end.index) and stream.failure is not None:
                    self._engine.send([Abort(end.attempt)])
                if stream.ended:
                    del running[end.attempt]
        return len(step.attempts)

    def _settle(self, stream: RequestStream, index: int) -> bool:
        """Answers questions about a sequence, and returns whether it has ended without its engine's knowing."""
        try:
            return not stream.ended and stream.sequences[index].settle()
        except RequestFailed as failure:
            stream.fail(failure)
            return True

    def close(self) -> None:
        """Ends the engine after a running call, and frees its memory. A second time or after a fork it does nothing."""
        if ORIGIN.is_forked:  # the engine's thread and the template's process are the parent's
            return
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


def _for_each(value: T | Sequence[T] | None, kind: type[Any], name: str, count: int, default: T) -> list[T]:
    """Returns a setting for each of `count` prompts; the default where there is none.

    Raises:
        TypeError: A value is no `kind`.
        ValueError: The list is not as long as that of the prompts.
    """
    if value is None:
        return [default] * count
    if isinstance(value, kind):
        return [value] * count
    values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    for one in values:
        if not isinstance(one, kind) and not (one is None and default is None):
            found, wanted = type(one).__name__, kind.__name__
            raise TypeError(f"{name} is a {found}, must be a {wanted} or a list with one for each prompt")
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} {kind.__name__} for {count} prompts")
    return values


def _results(kind: str, one: bool, streams: Sequence[RequestStream]) -> list[Completion]:
    """Returns the results of streams that have ended.

    Raises:
        RequestFailed: The single prompt failed.
        PromptsFailed: Prompts of a list failed; has the others' results.
    """
    completions, failures = dict[int, Completion](), dict[int, Exception]()
    for place, stream in enumerate(streams):
        try:
            completions[place] = completion_of(stream)
        except RequestFailed as failure:
            failures[place] = failure
    if failures:
        raise failures[0] if one else PromptsFailed(kind, len(streams), failures, completions)
    return list(completions.values())
