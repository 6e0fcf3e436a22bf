"""Requests of OpenAI's API as quire.v1's, and quire.v1's names of fields as the client's."""

import json
from collections.abc import Mapping
from typing import Any

from quire.v1 import generation_service_pb2 as pb

from rpc.gateway.chat_schema import ChatRequest
from rpc.gateway.completion_schema import CompletionRequest, Prompt
from rpc.gateway.regular import REGULAR
from rpc.gateway.schema import CommonRequest

SAME = {
    "model": "model",
    "add_special_tokens": "add_special_tokens",
    "priority": "priority",
    "cache_salt": "cache_salt",
} | {entry.vllm: entry.path for entry in REGULAR}
"""Fields that mean the same, as paths from the spec."""
READ = {entry.vllm: entry.read for entry in REGULAR}

OTHERS = {
    "sampling.seed": "seed",
    "sampling.logit_bias": "logit_bias",
    "sampling.logits_processors_args": "logits_processors_args",
    "sampling.beam_search.width": "n",
    "sampling.beam_search.length_penalty": "length_penalty",
    "sampling.beam_search": "use_beam_search",
    "prompt_truncation": "truncate_prompt_tokens",
    "prompt_truncation.tokens": "truncate_prompt_tokens",
    "output.prompt_logprobs": "prompt_logprobs",
    "chat.continue_final_message": "continue_final_message",
    "chat.add_generation_prompt": "add_generation_prompt",
    "chat.template_arguments": "chat_template_kwargs",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.tool_name": "tool_choice",
    "reasoning.max_tokens": "thinking_token_budget",
    "chat": "messages",
    "text": "prompt",
    "token_ids": "prompt",
}
"""The client's names of other fields that can be wrong."""


def names_of(asked: CommonRequest, position: int = 0) -> dict[str, str]:
    """Returns the client's names of the spec's fields, for the prompt at `position`."""
    newer = isinstance(asked, ChatRequest) and asked.max_completion_tokens is not None
    own = {
        "stopping.max_tokens": "max_completion_tokens" if newer else "max_tokens",
        "output.top_logprobs": "top_logprobs" if isinstance(asked, ChatRequest) else "logprobs",
    }
    if (asked.prompt_logprobs or 0) > _alternatives(asked):
        own["output.top_logprobs"] = "prompt_logprobs"
    if isinstance(asked, CompletionRequest) and len(asked.prompt) > 1:
        own["text"] = own["token_ids"] = f"prompt[{position}]"
    if isinstance(asked, ChatRequest):  # positions differ where tool_choice leaves some tools out
        own |= {f"chat.tools[{i}]": f"tools[{at}]" for i, at in enumerate(asked.offered) if i != at}
    for name, constraint in asked.constraints.items():
        own[f"structured_output.{constraint.WhichOneof('constraint')}"] = own["structured_output"] = name
    return {theirs: ours for ours, theirs in SAME.items()} | OTHERS | own | dict(asked.own_names)


def chat_spec(asked: ChatRequest) -> pb.GenerationSpec:
    """Returns the spec of a conversation."""
    spec = pb.GenerationSpec()
    for message in asked.messages:
        thought = message.reasoning_content or message.reasoning or ""
        turn = spec.chat.messages.add(role=message.role, reasoning=thought)
        turn.name = message.name or "" if message.role == "tool" else ""  # of others it is a hint
        turn.tool_call_id = message.tool_call_id or ""
        turn.tool_calls.extend(call.message() for call in message.tool_calls or ())
        for part in message.parts:
            if part.image_url is not None:
                turn.parts.add().image.data = part.image_url.url
            else:
                turn.parts.add(text=part.text or part.refusal or "")
    for name, value in _template_arguments(asked).items():
        spec.chat.template_arguments[name] = json.dumps(value)
    spec.chat.continue_final_message = bool(asked.continue_final_message)
    asked.add_tools(spec.chat)
    if asked.reasoning_tokens is not None:
        spec.reasoning.max_tokens = asked.reasoning_tokens
    if asked.add_generation_prompt is not None:
        spec.chat.add_generation_prompt = asked.add_generation_prompt
    _common(asked, spec)
    spec.output.logprobs = bool(asked.logprobs)
    return spec


def _template_arguments(asked: ChatRequest) -> dict[str, Any]:
    """Returns the arguments of the model's template; reasoning_effort is one, as in vLLM."""
    own = asked.chat_template_kwargs or {}
    reasoning = asked.reasoning
    effort = asked.reasoning_effort or (reasoning.effort if reasoning else None)
    enabled = reasoning.enabled if reasoning and reasoning.enabled is not None else effort and effort != "none"
    thinks = {} if enabled is None else {"enable_thinking": bool(enabled), "thinking": bool(enabled)}
    return thinks | own | ({} if effort is None else {"reasoning_effort": effort})


def completion_spec(asked: CompletionRequest, prompt: Prompt) -> pb.GenerationSpec:
    """Returns the spec of the prompt at `position`."""
    spec = pb.GenerationSpec()
    if isinstance(prompt, str):
        spec.text = prompt
    else:
        spec.token_ids.ids.extend(prompt)
    _common(asked, spec)
    spec.output.logprobs = asked.logprobs is not None
    if asked.echo:
        spec.output.prompt_logprobs |= asked.logprobs is not None
        spec.output.prompt_token_ids = True
    return spec


def _alternatives(asked: CommonRequest) -> int:
    """Returns how many logprobs of other tokens each output token has."""
    wanted = asked.top_logprobs if isinstance(asked, ChatRequest) else getattr(asked, "logprobs", None)
    return wanted or 0


def _common(asked: CommonRequest, spec: pb.GenerationSpec) -> None:
    for ours, theirs in SAME.items():
        if (value := getattr(asked, ours, None)) is not None:
            _set(spec, theirs, READ[ours](value) if ours in READ else value)
    sampling = spec.sampling
    if asked.seed is not None:
        sampling.seed = asked.seed % 2**64  # those below 0 too are seeds
    for token, bias in asked.logit_bias or ():
        sampling.logit_bias[token] = bias
    for name, args in (asked.logits_processors_args or {}).items():
        sampling.logits_processors_args[name] = json.dumps(args)
    if asked.use_beam_search:
        sampling.beam_search.width = asked.sequences
        if asked.length_penalty is not None:
            sampling.beam_search.length_penalty = asked.length_penalty
    if (longest := asked.longest) is not None:
        spec.stopping.max_tokens = longest
    for constraint in asked.constraints.values():
        spec.structured_output.CopyFrom(constraint)
    output = spec.output
    output.top_logprobs = max(_alternatives(asked), asked.prompt_logprobs or 0)
    output.prompt_logprobs = asked.prompt_logprobs is not None
    output.token_ids = output.prompt_token_ids = bool(asked.return_token_ids)
    if asked.truncate_prompt_tokens is not None:
        spec.prompt_truncation.keep_first = asked.truncation_side == "right"
        if asked.truncate_prompt_tokens >= 0:
            spec.prompt_truncation.tokens = asked.truncate_prompt_tokens


def _set(spec: pb.GenerationSpec, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    message: Any = spec
    for parent in parents:
        message = getattr(message, parent)
    if isinstance(value, list):
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


def metadata_of(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns the headers that servers get, without empty ones: the token and the trace."""
    return tuple((name, headers[name]) for name in PASSED_ON if headers.get(name))


PASSED_ON = ("authorization", "traceparent", "tracestate")
