"""vLLM's v1 Scheduler as a side of `bench.peers.scheduling`. It runs in vLLM's virtual environment."""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.peers.scheduling import PAGE, STOP, TOKEN, MakeSide, News, prompt_of
from bench.peers.scheduling_cases import MOST, Case

LONGEST = 40_000  # tokens of a sequence
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 1,
    "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49_152,
    "max_position_embeddings": LONGEST, "torch_dtype": "bfloat16",
}  # fmt: skip


def sides() -> dict[str, MakeSide]:
    """Returns vLLM with each of its policies, and with the settings of a case.

    Raises:
        ImportError: vLLM is not installed.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(PAGE, sha256)
    return {
        "vLLM fcfs": lambda case: VllmSide(case, {}, hasher),
        "vLLM priority": lambda case: VllmSide(case, {"policy": "priority"}, hasher),
        "vLLM, set": lambda case: VllmSide(case, case.theirs, hasher) if case.theirs else None,
    }


class VllmSide:
    """vLLM's scheduler, called like its engine core calls it."""

    def __init__(self, case: Case, settings: Mapping[str, str | float], hasher: Any) -> None:
        """settings: of `SchedulerConfig`, beside rows and budget."""
        self._requests, self._hasher = case.requests, hasher
        self._scheduler = _scheduler(case, settings)
        self._most = settings.get("max_num_queued_reqs", math.inf)
        self._planned: Any = None
        self._refused: list[int] = []
        self.preemptions = 0

    def submit(self, number: int, now: float) -> None:  # noqa: ARG002
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        # `AsyncLLM.check_admission` refuses here, before the scheduler.
        if self._scheduler.get_num_unfinished_requests() >= self._most:
            self._refused.append(number)
            return
        asked = self._requests[number]
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=[STOP], max_tokens=MOST)
        sampling.update_from_generation_config({}, 0)
        hurry = asked.priority if math.isinf(asked.deadline) else round(1000 * (asked.arrives + asked.deadline))
        request = Request(
            request_id=str(number),
            prompt_token_ids=prompt_of(number, asked),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=asked.arrives,
            priority=hurry,
            block_hasher=self._hasher,
        )
        self._scheduler.add_request(request)

    def leave(self, number: int) -> None:
        from vllm.v1.request import RequestStatus

        self._scheduler.finish_requests(str(number), RequestStatus.FINISHED_ABORTED)

    def plan(self, now: float) -> NDArray[np.int32] | None:  # noqa: ARG002
        self._planned = planned = self._scheduler.schedule()
        self.preemptions += len(planned.preempted_req_ids or ())
        if not planned.num_scheduled_tokens:
            return None
        # By now `num_computed_tokens` counts the step that was planned.
        return np.array(
            [
                (int(name), self._scheduler.requests[name].num_computed_tokens - count, count)
                for name, count in planned.num_scheduled_tokens.items()
            ],
            np.int32,
        )

    def commit(self, now: float) -> News:  # noqa: ARG002
        from vllm.v1.outputs import ModelRunnerOutput

        names, tokens = list(self._planned.num_scheduled_tokens), list[list[int]]()
        drew, whole = list[int](), list[int]()
        for name in names:
            request, number = self._scheduler.requests[name], int(name)
            if request.num_computed_tokens < request.num_tokens:
                tokens.append([])
                continue
            drew.append(number)
            if request.num_output_tokens + 1 < self._requests[number].output:
                tokens.append([TOKEN])
            else:
                tokens.append([STOP])
                whole.append(number)
        indices = {name: i for i, name in enumerate(names)}
        result = ModelRunnerOutput(req_ids=names, req_id_to_index=indices, sampled_token_ids=tokens)
        self._scheduler.update_from_output(self._planned, result)
        if any(str(number) in self._scheduler.requests for number in whole):
            raise RuntimeError("vLLM's scheduler goes on with an output that has ended")
        refused, self._refused = self._refused, []
        return News(drew, whole, refused)


def _scheduler(case: Case, settings: Mapping[str, str | float]) -> Any:
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPE))
        model = ModelConfig(
            model=directory, tokenizer=directory, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=LONGEST
        )
    steps = SchedulerConfig(
        max_num_seqs=case.rows,
        max_num_batched_tokens=case.budget,
        max_model_len=LONGEST,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        **settings,
    )
    steps.async_scheduling = False
    cache = CacheConfig(block_size=PAGE, enable_prefix_caching=True)
    config = VllmConfig(scheduler_config=steps, model_config=model, cache_config=cache)
    cache.block_size, cache.num_gpu_blocks = PAGE, case.pages + 1  # one of them is its null block
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    blocks = KVCacheConfig(
        num_blocks=case.pages + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=blocks,
        log_stats=False,
        block_size=PAGE,
        structured_output_manager=StructuredOutputManager(config),
    )
