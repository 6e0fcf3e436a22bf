"""Runs vLLM for CPUs through LLMEngine, token ids in and out.

python -m bench.peers.vllm_engine MODEL KV_TOKENS eager|compile [BACKEND]

It ignores KV_TOKENS: VLLM_CPU_KVCACHE_SPACE sets the size of its KV cache. BACKEND is the library that keeps JSON
schemas; without it no request has one.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.peers.worker import Trace, serve
from bench.peers.workloads import PeerRequest, Workload


class VllmEngine:
    """vLLM as a `PeerEngine`."""

    def __init__(self, model: str, _: str, mode: str, backend: str = "") -> None:
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        import vllm
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        self.version = vllm.__version__
        self._sampling, self._structured = vllm.SamplingParams, StructuredOutputsParams
        self._kind = RequestOutputKind.DELTA
        self._engine = vllm.LLM(
            model,
            dtype=json.loads((Path(model) / "config.json").read_text())["torch_dtype"],
            max_model_len=4096,
            max_num_seqs=32,
            max_num_batched_tokens=2048,
            enforce_eager=mode == "eager",
            enable_prefix_caching=True,
            skip_tokenizer_init=not backend,
            # A random model would fill outputs with the whitespace that vLLM allows otherwise.
            structured_outputs_config={"backend": backend or "auto", "disable_any_whitespace": bool(backend)},
        ).llm_engine
        self._asked = 0

    def run(self, workload: Workload) -> Sequence[Trace]:
        began = time.perf_counter()
        traces, waiting = dict[str, Trace](), workload.requests[::-1]
        while waiting or self._engine.has_unfinished_requests():
            while waiting and waiting[-1].arrives <= time.perf_counter() - began:
                traces[self._add(waiting.pop())] = Trace()
            if not self._engine.has_unfinished_requests():
                time.sleep(max(0.0, waiting[-1].arrives - (time.perf_counter() - began)))
                continue
            outputs = self._engine.step()
            moment = time.perf_counter()
            for output in outputs:
                traces[output.request_id].add(moment, output.outputs[0].token_ids)
        return list(traces.values())

    def _add(self, asked: PeerRequest) -> str:
        name, self._asked = str(self._asked), self._asked + 1
        # Its draws have the engine's seed: with one of their own it draws the requests one by one, which takes longer.
        sampling = self._sampling(
            temperature=0.0 if asked.seed is None else 1.0,
            ignore_eos=not asked.schema,
            max_tokens=asked.tokens,
            detokenize=False,
            output_kind=self._kind,
            structured_outputs=self._structured(json=asked.schema) if asked.schema else None,
        )
        self._engine.add_request(name, {"prompt_token_ids": asked.prompt}, sampling)
        return name


if __name__ == "__main__":
    serve(lambda: VllmEngine(*sys.argv[1:]))
