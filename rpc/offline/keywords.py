"""Hints for arguments of vLLM's `LLM` that Quire names otherwise or lacks: argument name to remedy."""

from scheduler.keywords import NOT_HERE
from scheduler.parameters import REQUEST_KEYWORDS

_ALWAYS = "Quire does that anyway: leave it out"
_LOCAL = "fetch the checkpoint first, LLM(model=...) takes a directory"
CONSTRUCTOR_KEYWORDS = {
    "attention_backend": "LLM(backend=...)",
    "block_size": "LLM(page_size=...)",
    "chat_template": "chat_template.jinja in the model's directory",
    "compilation_config": NOT_HERE,
    "cpu_offload_gb": NOT_HERE,
    "data_parallel_size": "`quire serve --replicas`",
    "disable_log_stats": _ALWAYS,
    "distributed_executor_backend": "`quire serve --ray`",
    "download_dir": _LOCAL,
    "enable_chunked_prefill": _ALWAYS,
    "enable_lora": NOT_HERE,
    "enable_prefix_caching": "LLM(prefix_cache=...)",
    "enforce_eager": "LLM(backend='reference') computes without compiled kernels",
    "hf_overrides": "config.json in the model's directory",
    "kv_cache_memory_bytes": "LLM(kv_cache_memory=...)",
    "limit_mm_per_prompt": "Quire takes up to 16 images a prompt: leave it out",
    "load_format": "Quire reads safetensors and GGUF alone: leave it out",
    "max_logprobs": "Quire gives up to 20 alternatives: leave it out",
    "max_model_len": "Quire serves the model's whole context; Stopping(max_tokens=...) bounds an output, "
    "LLM(kv_cache_memory=...) the cache",
    "max_num_batched_tokens": "LLM(max_batched_tokens=...)",
    "max_num_seqs": "LLM(max_sequences=...)",
    "mm_processor_kwargs": NOT_HERE,
    "num_gpu_blocks_override": "LLM(kv_cache_memory=...), in bytes",
    "pipeline_parallel_size": "LLM(tensor_parallel=...) divides a model",
    "revision": _LOCAL,
    "runner": "Quire generates text alone: leave it out",
    "seed": "Sampling(seed=...), of each call",
    "skip_tokenizer_init": NOT_HERE,
    "speculative_config": "LLM(speculative_tokens=...): prompt lookup, vLLM's method 'ngram'",
    "structured_outputs_config": "LLM(structured_output_backend=...)",
    "swap_space": "LLM(host_cache_memory=...), in bytes",
    "task": "Quire generates text alone: leave it out",
    "tensor_parallel_size": "LLM(tensor_parallel=...)",
    "tokenizer": "the tokenizer in the model's directory",
    "tokenizer_mode": NOT_HERE,
    "trust_remote_code": "Quire never runs code of a checkpoint: leave it out",
}
_CALL_KEYWORDS = REQUEST_KEYWORDS | {
    "lora_request": NOT_HERE,
    "mm_processor_kwargs": NOT_HERE,
    "priority": NOT_HERE,
    "sampling_params": "sampling=Sampling(...), stopping=Stopping(...), output=Output(...)",
    "tokenization_kwargs": NOT_HERE,
}
GENERATE_KEYWORDS = _CALL_KEYWORDS | {
    "multi_modal_data": "generate(images=...), or {'prompt': ..., 'multi_modal_data': {'image': ...}}",
    "prompt_token_ids": "generate(prompts=...) takes token ids",
}
CHAT_KEYWORDS = _CALL_KEYWORDS | {
    "chat_template": "chat_template.jinja in the model's directory",
    "chat_template_content_format": "Quire reads it from the template: leave it out",
    "chat_template_kwargs": "chat(template_arguments=...)",
    "messages": "chat(conversations=...)",
}
