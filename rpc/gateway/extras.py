"""Fields of requests that do not reach a server: hints, which are ignored, and features that Quire lacks."""

from typing import Annotated, Any

from pydantic import Field

from rpc.gateway.fields import MOST_KEYS, Strict, only


class Hints(Strict):
    """Fields of both endpoints that cannot change a response. Any value is accepted and ignored."""

    user: Any = None
    safety_identifier: Any = None
    metadata: Annotated[dict[str, Any] | None, Field(max_length=MOST_KEYS)] = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    prediction: Any = None
    verbosity: Any = None

    # vLLM's
    session_id: Any = None
    spaces_between_special_tokens: Any = None  # has no effect with the tokenizers library, neither here nor in vLLM
    return_token_offsets: Any = None  # for vLLM's render endpoints, like the next two
    mm_payload: Any = None
    return_mm_kwargs: Any = None


class NotServed(Strict):
    """Fields of both endpoints that would change a response. Only neutral values are accepted."""

    store: Annotated[Any, only(False)] = None

    # vLLM's
    logprob_token_ids: Annotated[Any, only([])] = None
    repetition_detection: Annotated[Any, only()] = None
    watermarking: Annotated[Any, only(False)] = None
    return_weight_versions: Annotated[Any, only(False)] = None
    routed_experts_prompt_start: Annotated[Any, only(0)] = None
    return_prompt_text: Annotated[Any, only(False)] = None
    kv_transfer_params: Annotated[Any, only({})] = None
    ec_transfer_params: Annotated[Any, only({})] = None
    vllm_xargs: Annotated[Any, only({})] = None


class NotServedInChats(Strict):
    """`NotServed` for the fields of chats."""

    functions: Annotated[Any, only([])] = None  # of the past, as the next one: tools took their place
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
    moderation: Annotated[Any, only()] = None

    # vLLM's
    echo: Annotated[Any, only(False)] = None
    add_special_tokens: Annotated[Any, only(False)] = None
    documents: Annotated[Any, only([])] = None
    chat_template: Annotated[Any, only()] = None  # a program, from an untrusted client
    media_io_kwargs: Annotated[Any, only({})] = None
    mm_processor_kwargs: Annotated[Any, only({})] = None
