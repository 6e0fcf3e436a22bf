"""Tiny random checkpoints, written by transformers in float32, with a byte-level tokenizer beside them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    PretrainedConfig,
)


def write_llama(directory: Path, seed: int = 0, shards: bool = False, **changes: object) -> Path:
    return write(LlamaConfig, directory, seed, shards, **changes)


def write_mistral(directory: Path, window: int | None, seed: int = 0, **changes: object) -> Path:
    """All layers have this window."""
    return write(MistralConfig, directory, seed, sliding_window=window, **changes)


def write_ministral(directory: Path, window: int, kinds: str, seed: int = 0, **changes: object) -> Path:
    """kinds: a letter a layer, f for full attention, s for one with this window."""
    layers = [{"f": "full_attention", "s": "sliding_attention"}[kind] for kind in kinds]
    return write(
        MinistralConfig,
        directory,
        seed,
        sliding_window=window,
        layer_types=layers,
        num_hidden_layers=len(layers),
        head_dim=16,  # its class needs it said
        **changes,
    )


def write_llama4(directory: Path, chunk: int, seed: int = 0, **changes: object) -> Path:
    """Three of four layers see chunks."""
    shape = {"num_hidden_layers": 4, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4}
    return write(Llama4TextConfig, directory, seed, attention_chunk_size=chunk, **(shape | changes))


def write(
    kind: type[PretrainedConfig], directory: Path, seed: int = 0, shards: bool = False, **changes: object
) -> Path:
    """A random checkpoint whose logits are spread enough that greedy decoding has clear winners.

    Norms and biases are random too: transformers makes them 1 and 0, which would hide a model that leaves them out.
    """
    torch.manual_seed(seed)
    values = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
        "dtype": "float32",
    } | changes
    model = AutoModelForCausalLM.from_config(kind(**values)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0.0, 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory, max_shard_size="60KB" if shards else "5GB")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def greedy_ids(directory: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Returns what transformers generates for each prompt, alone, in float32; end tokens do not end it."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        everything = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
        )
        outputs.append(everything[0, len(prompt) :].tolist())
    assert all(len(output) == new_tokens for output in outputs)
    return outputs


def byte_tokenizer() -> Tokenizer:
    """Bytes and a few merges; 257 to 320 ids, <|end|> is 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, then the rat ate the hat and that was that"] * 20, trainer)
    return tokenizer
