"""Runs llama.cpp through llama-cpp-python's low-level interface, in a batching loop like its server's.

A turn computes the next token of every sequence, and as much of the waiting prompts as fits. A prefix that a prompt
shares with a running sequence is copied from it.

python -m bench.peers.llama_cpp_engine MODEL.gguf KV_TOKENS
"""

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.peers.llama_cpp_sampler import LlamaSampler, most_likely
from bench.peers.worker import Trace, serve
from bench.peers.workloads import PeerRequest, Workload

BATCH, SEQUENCES = 2048, 32
LEAST_SHARED = 64  # tokens of a prefix that is worth a copy


@dataclass
class LlamaSequence:
    """A running sequence.

    Attributes:
        request: Index of its request.
        prompt: Tokens of its prompt.
        done: Number of computed tokens.
        next: Token to compute next; None while its prompt is computed.
        sampler: Draws its tokens; None takes the most likely ones.
    """

    request: int
    prompt: list[int]
    done: int
    next: int | None = None
    sampler: LlamaSampler | None = None


class LlamaCpp:
    """llama.cpp as a `PeerEngine`."""

    def __init__(self, model: str, kv_tokens: str) -> None:
        import llama_cpp as lib

        self._kv_tokens = int(kv_tokens)

        self._lib, self.version = lib, lib.__version__
        self._silent = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._silent, ctypes.c_void_p(0))
        lib.llama_backend_init()
        options = lib.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(model.encode(), options)
        self._vocabulary = lib.llama_model_get_vocab(self._model)
        self._tokens = lib.llama_vocab_n_tokens(self._vocabulary)
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        self._context: Any = None
        self._memory: Any = None
        self._opened = (False, SEQUENCES)
        self._open(*self._opened)

    def _open(self, unified: bool, sequences: int) -> None:
        """Opens a new context.

        Args:
            unified: Whether sequences may share prefixes. Each then searches the cells of all, which took twice as long
                with W1.
            sequences: Sequences at once. Where they are not unified, each has an equal part of the KV cache.
        """
        lib = self._lib
        if self._context is not None:
            lib.llama_free(self._context)
        settings = lib.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = self._kv_tokens, BATCH, 512, sequences
        settings.n_threads = settings.n_threads_batch = os.cpu_count() or 1
        settings.kv_unified, settings.flash_attn_type = unified, 1
        self._context, self._opened = lib.llama_init_from_model(self._model, settings), (unified, sequences)
        if not self._context:
            raise RuntimeError("llama.cpp has no context for this model")
        self._memory = lib.llama_get_memory(self._context)

    def prepare(self, workload: Workload) -> None:
        needed = (bool(workload.shared), workload.together)
        if self._opened != needed:
            self._open(*needed)

    def run(self, workload: Workload) -> Sequence[Trace]:
        began = time.perf_counter()
        lib, requests = self._lib, workload.requests
        lib.llama_memory_clear(self._memory, False)
        waiting, free = list(range(len(requests)))[::-1], list(range(workload.together))[::-1]
        running: dict[int, LlamaSequence] = {}
        traces = [Trace() for _ in requests]
        while waiting or running:
            now = time.perf_counter() - began
            if not running:
                time.sleep(max(0.0, requests[waiting[-1]].arrives - now))
            while waiting and free and requests[waiting[-1]].arrives <= time.perf_counter() - began:
                asked = requests[waiting[-1]]
                prompt = asked.prompt
                found = self._shared(prompt, running)
                if found is None:
                    break
                slot, (source, shared) = free.pop(), found
                if shared:
                    lib.llama_memory_seq_cp(self._memory, source, slot, 0, shared)
                running[slot] = LlamaSequence(waiting.pop(), prompt, shared, None, self._sampler(asked))
            drawn = self._step(running)
            moment = time.perf_counter()
            for slot, (token, ends) in drawn:
                one = running[slot]
                one.next = token
                traces[one.request].add(moment, (token,))
                if ends or len(traces[one.request].times) == requests[one.request].tokens:
                    if one.sampler is not None:
                        one.sampler.close()
                    lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
                    del running[slot]
                    free.append(slot)
        return traces

    @staticmethod
    def _shared(prompt: list[int], running: dict[int, LlamaSequence]) -> tuple[int, int] | None:
        """Returns the sequence with the longest common prefix and its length; None while that prefix is computed."""
        best = (0, 0)
        for slot, one in running.items():
            pairs = zip(prompt[:-1], one.prompt, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt) - 1, len(one.prompt)))
            if same >= LEAST_SHARED and one.done < same:
                return None
            if same >= max(LEAST_SHARED, best[1] + 1):
                best = (slot, same)
        return best

    def _sampler(self, asked: PeerRequest) -> LlamaSampler | None:
        return None if asked.seed is None else LlamaSampler(self._lib, self._vocabulary, asked.seed, asked.schema)

    def _step(self, running: dict[int, LlamaSequence]) -> list[tuple[int, tuple[int, bool]]]:
        """Computes one batch; returns sequences, their next tokens, and whether these end them."""
        wanted, used = list[tuple[int, int]](), 0
        for slot, one in running.items():
            if one.next is not None:
                wanted.append((slot, used))
                used = self._put(used, [one.next], one, slot, last=True)
        for slot, one in running.items():
            if one.next is None and used < BATCH:
                tokens = one.prompt[one.done : one.done + BATCH - used]
                last = one.done + len(tokens) == len(one.prompt)
                used = self._put(used, tokens, one, slot, last)
                if last:
                    wanted.append((slot, used - 1))
        self._batch.n_tokens = used
        if self._lib.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed")
        return [(slot, self._drawn(running[slot].sampler, at)) for slot, at in wanted]

    def _put(self, used: int, tokens: list[int], one: LlamaSequence, slot: int, last: bool) -> int:
        batch: Any = self._batch
        for i, token in enumerate(tokens, used):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, one.done, 1, slot
            batch.logits[i] = last and i == used + len(tokens) - 1
            one.done += 1
        return used + len(tokens)

    def _drawn(self, sampler: LlamaSampler | None, at: int) -> tuple[int, bool]:
        if sampler is None:
            return most_likely(self._lib, self._context, at, self._tokens), False
        return sampler.next(self._context, at)


if __name__ == "__main__":
    serve(lambda: LlamaCpp(*sys.argv[1:]))
