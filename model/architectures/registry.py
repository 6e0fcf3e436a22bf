"""Functions that load models, by the architecture in config.json."""

import logging
import re
from collections.abc import Callable
from dataclasses import replace

import torch

from model.architectures import (
    bloom,
    cohere,
    deepseek,
    ernie4_5_moe,
    exaone4,
    falcon,
    falcon_h1,
    gemma,
    gemma4,
    glm4,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_hybrid,
    hunyuan,
    kimi_linear,
    lfm2,
    llama,
    llama4,
    mamba2,
    minimax_m2,
    mixtral,
    nano,
    nemotron_h,
    olmo2,
    opt,
    phi,
    phimoe,
    qwen3_next,
    stablelm,
    starcoder2,
)
from model.config import ModelConfig
from model.decoder import Decoder
from model.multimodal import NANO
from model.parallel.collective import ONE_RANK, Ranks
from model.source import Renamed
from model.tensors import ProductMaker, Tensors
from model.vision_families import KINDS
from model.weight_formats.plain import PLAIN
from model.weight_formats.registry import open_weight_format
from model.weights import Checkpoint

log = logging.getLogger("quire.model")


ARCHITECTURES: dict[str, Callable[[ModelConfig, Tensors], Decoder]] = {
    "Cohere2ForCausalLM": cohere.load_cohere2,
    "BloomForCausalLM": bloom.load_bloom,
    "CohereForCausalLM": cohere.load_cohere,
    "DeepseekV2ForCausalLM": deepseek.load_deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek.load_deepseek_v3,
    "Ernie4_5ForCausalLM": llama.load_ernie4_5,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe.load_ernie4_5_moe,
    "Exaone4ForCausalLM": exaone4.load_exaone4,
    "FalconForCausalLM": falcon.load_falcon,
    "FalconH1ForCausalLM": falcon_h1.load_falcon_h1,
    "GPT2LMHeadModel": gpt2.load_gpt2,
    "GPTJForCausalLM": gptj.load_gptj,
    "GPTNeoXForCausalLM": gpt_neox.load_gpt_neox,
    "Gemma2ForCausalLM": gemma.load_gemma2,
    "Gemma3ForCausalLM": gemma.load_gemma3,
    "GemmaForCausalLM": gemma.load_gemma,
    "Gemma4ForCausalLM": gemma4.load_gemma4,
    "Glm4ForCausalLM": glm4.load_glm4,
    "Glm4MoeForCausalLM": glm4_moe.load_glm4_moe,
    "Glm4MoeLiteForCausalLM": deepseek.load_glm4_moe_lite,
    "GptOssForCausalLM": gpt_oss.load_gpt_oss,
    "GraniteForCausalLM": granite.load_granite,
    "GraniteMoeForCausalLM": granite.load_granite_moe,
    "GraniteMoeHybridForCausalLM": granite_hybrid.load_granite_hybrid,
    "Lfm2ForCausalLM": lfm2.load_lfm2,
    "Lfm2MoeForCausalLM": lfm2.load_lfm2_moe,
    "MptForCausalLM": bloom.load_mpt,
    "NemotronHForCausalLM": nemotron_h.load_nemotron_h,
    "HunYuanDenseV1ForCausalLM": hunyuan.load_hunyuan,
    "KimiLinearForCausalLM": kimi_linear.load_kimi_linear,
    "Llama4ForCausalLM": llama4.load_llama4,
    "LlamaForCausalLM": llama.load_llama,
    "Mamba2ForCausalLM": mamba2.load_mamba2,
    "MiniMaxM2ForCausalLM": minimax_m2.load_minimax_m2,
    "MinistralForCausalLM": llama.load_llama,
    "Mistral4ForCausalLM": deepseek.load_mistral4,
    "MistralForCausalLM": llama.load_llama,
    "MixtralForCausalLM": mixtral.load_mixtral,
    "OPTForCausalLM": opt.load_opt,
    "Olmo2ForCausalLM": olmo2.load_olmo2,
    "Olmo3ForCausalLM": olmo2.load_olmo3,
    "Phi3ForCausalLM": llama.load_phi3,
    "PhiForCausalLM": phi.load_phi,
    "PhimoeForCausalLM": phimoe.load_phimoe,
    "Qwen2ForCausalLM": llama.load_qwen2,
    "Qwen2MoeForCausalLM": mixtral.load_qwen2_moe,
    "Qwen3ForCausalLM": llama.load_qwen3,
    "Qwen3MoeForCausalLM": mixtral.load_qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next.load_qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_next.load_qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_next.load_qwen3_5_moe,
    "SeedOssForCausalLM": llama.load_seed_oss,
    "SmolLM3ForCausalLM": llama.load_smollm3,
    "StableLmForCausalLM": stablelm.load_stablelm,
    "Starcoder2ForCausalLM": starcoder2.load_starcoder2,
}
"""Models of text; `model.families.FAMILIES` has the same names."""

INSIDE = {NANO: nano.load_nano}
"""Models of text that are found in no checkpoint of their own."""

TEXT_PREFIXES = (
    (("model.", "model.language_model."), ("lm_head.", "lm_head.")),
    (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    (("model.", "model.text_model."), ("lm_head.", "lm_head.")),
    (("model.", "model."), ("lm_head.", "lm_head.")),
)
"""Prefixes of a vision-language model's text tensors: pairs of the text model's own prefix and theirs."""

KV_SCALES = re.compile(
    r".*\.(?:(?:[kv]_proj\.)?(?:q|k|v|kv|prob)_(?:scale|zero_point)|[kv]_proj\.output_(?:scale|zero_point))"
)
"""Tensors of a quantized checkpoint that are for a KV cache in 8 bits."""


def build_model(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Builds a model, with `config` from `read_config`. Raises CheckpointError for a checkpoint that does not fit."""
    architecture = config.architecture if config.vision is None else config.vision.text
    load = (ARCHITECTURES | INSIDE)[architecture]
    text = _text_tensors(tensors) if config.architecture in KINDS else tensors
    decoder = load(replace(config, architecture=architecture), text)
    if config.vision is None:
        return decoder
    from model.vision.loading import load_encoder  # here: it needs Pillow, a model of text does not

    return replace(decoder, vision=load_encoder(config, tensors.plain()), deepstack=config.vision.deepstack)


def load_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    maker: ProductMaker | None = None,
    ranks: Ranks = ONE_RANK,
) -> Decoder:
    """Builds a model.

    Args:
        checkpoint: Open files of the model.
        config: Configuration of the model, undivided.
        dtype: Dtype of weights that are not quantized.
        device: Device that the model runs on.
        quantization: See `open_weight_format`.
        maker: See `Tensors`.
        ranks: See `Tensors`.

    Raises:
        CheckpointError: See `build_model`; or a tensor is left over.
    """
    weights = open_weight_format(config, quantization)
    tensors = Tensors(checkpoint, dtype, device, weights, maker, ranks)
    if config.quantization is not None:
        _pass_over_kv_scales(checkpoint)
    model = build_model(config, tensors)
    checkpoint.finish()
    kind = str(dtype).removeprefix("torch.") if weights is PLAIN else weights.name
    log.info("Weights: %.1f MiB (%s)", tensors.held.bytes / 2**20, kind)
    return model


def _pass_over_kv_scales(checkpoint: Checkpoint) -> None:
    """Ignores scales of a KV cache: a pool in 8 bits has its own, of each token and head, which are finer."""
    count = sum(KV_SCALES.fullmatch(name) is not None for name in checkpoint)
    if count:
        checkpoint.ignore(KV_SCALES.pattern)
        log.info(
            "%d scales of the checkpoint's KV cache are not used: --kv-cache-dtype int8 or fp8 has scales of its own",
            count,
        )


def _text_tensors(tensors: Tensors) -> Tensors:
    """Returns the text model's tensors, by their names in a checkpoint of the text model alone."""
    styles = [tensors.of(Renamed(tensors.checkpoint, prefixes)) for prefixes in TEXT_PREFIXES]
    return next((style for style in styles if "model.embed_tokens.weight" in style), styles[0])
