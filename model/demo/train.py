"""Trains the demo model and writes it as a Hugging Face directory: `make demo-model`.

Text: the plays of Shakespeare in `tinyshakespeare.txt` (public domain). The last tenth is held out. Speeches are
grouped into documents of 16, each ended by <|endoftext|>, so that the model learns to stop. Takes 20 minutes on two
cores; the weights with the best validation loss are kept.
"""

import json
import math
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from model.demo.network import DemoLlama
from model.demo.ngram import KneserNey

HERE = Path(__file__).parent
END = "<|endoftext|>"
SPEECHES_A_DOCUMENT = 16
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def documents(text: str) -> list[str]:
    speeches = text.split("\n\n")
    step = SPEECHES_A_DOCUMENT
    return ["\n\n".join(speeches[i : i + step]) for i in range(0, len(speeches), step)]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"], special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def windows(ids: Tensor, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(ids) - length - 1, (count,), generator=generator)
    rows = torch.stack([ids[s : s + length + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def validation_loss(network: DemoLlama, ids: Tensor, length: int) -> float:
    """Mean loss in nats a token over the whole held-out text, in windows of `length`."""
    network.eval()
    total = 0.0
    for start in range(0, len(ids) - 1, length):
        piece = ids[start : start + length + 1]
        logits = network(piece[None, :-1])
        total += F.cross_entropy(logits[0].float(), piece[1:], reduction="sum").item()
    network.train()
    return total / (len(ids) - 1)


def learning_rate(step: int, steps: int, peak: float) -> float:
    warm = min(1.0, (step + 1) / 50)
    return peak * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def fit(
    network: DemoLlama, train: Tensor, held_out: Tensor, steps: int, tokens_a_step: int
) -> tuple[float, dict[str, Tensor]]:
    """Returns the best validation loss and the weights that had it."""
    matrices = [p for p in network.parameters() if p.dim() == 2]
    vectors = [p for p in network.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    generator = torch.Generator().manual_seed(1)
    best, started = float("inf"), time.monotonic()
    weights: dict[str, Tensor] = {}
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, 1.5e-3)
        length = 1024 if step % 4 == 3 else 256  # short windows are cheaper; the long ones teach all positions
        x, y = windows(train, tokens_a_step // length, length, generator)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(network(x).flatten(0, 1).float(), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            held = validation_loss(network, held_out, 1024)
            if held < best:
                best, weights = held, network.checkpoint()
            print(
                f"step {step + 1}/{steps}  train {loss.item():.3f}  validation {held:.3f}  best {best:.3f}  "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
    return best, weights


README = """---
license: apache-2.0
---
# Quire's demo model: Shakespeare in {parameters:.1f} M parameters

A Llama-architecture model (6 layers, 256 wide, 8 heads over 4 KV heads, context 1,024, byte-level BPE of 2,048 tokens)
that lets `make serve` answer without a download. It imitates the look of the plays; it knows nothing.

- Data: `model/demo/tinyshakespeare.txt`, 1.1 MB of Shakespeare's plays (public domain; collected in karpathy/char-rnn).
  The first nine tenths train, the last tenth is held out.
- Licence of the weights: Apache-2.0, as the project.
- Made by `make demo-model` ({steps} steps of {tokens} tokens); the weights with the best validation loss were kept.

| on the held-out tenth | nats a token | bits a character |
|---|---|---|
| this model | {loss:.3f} | {bits:.3f} |
| trigram, interpolated Kneser-Ney, same tokens | {ngram:.3f} | {ngram_bits:.3f} |
| uniform over the vocabulary | {uniform:.3f} | {uniform_bits:.3f} |
"""


def write_directory(out: Path, tokenizer: Tokenizer, weights: dict[str, Tensor], readme: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # the library writes 0600
    tokenizer.save(str(out / "tokenizer.json"))
    generation = {"bos_token_id": 0, "eos_token_id": 0, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": 1024}
    for name, content in {
        "config.json": CONFIG,
        "generation_config.json": generation,
        "tokenizer_config.json": special,
    }.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    (out / "README.md").write_text(readme)


def main(
    out: Annotated[Path, typer.Option(help="Directory to write.")] = HERE / "checkpoint",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 1200,
    tokens_a_step: Annotated[int, typer.Option(help="Tokens in one step's batch.")] = 4096,
    dropout: Annotated[float, typer.Option(help="Dropout while training.")] = 0.2,
) -> None:
    """Train Quire's demo model on the plays of Shakespeare."""
    torch.manual_seed(0)
    text = (HERE / "tinyshakespeare.txt").read_text()
    split = len(text) * 9 // 10
    parts = [documents(text[:split]), documents(text[split:])]
    tokenizer = train_tokenizer(parts[0])
    train, held_out = ([i for doc in part for i in tokenizer.encode(doc + END).ids] for part in parts)
    nats_to_bits = len(held_out) / len(text[split:]) / math.log(2)
    ngram = KneserNey(train, CONFIG["vocab_size"]).loss(held_out)
    network = DemoLlama(CONFIG, dropout)
    parameters = sum(p.numel() for p in network.parameters())
    print(f"{parameters:,} parameters, {len(train):,} training tokens, {len(held_out):,} held out; trigram {ngram:.3f}")
    loss, weights = fit(network, torch.tensor(train), torch.tensor(held_out), steps, tokens_a_step)
    uniform = math.log(CONFIG["vocab_size"])
    readme = README.format(
        parameters=parameters / 1e6,
        steps=steps,
        tokens=f"{tokens_a_step:,}",
        loss=loss,
        bits=loss * nats_to_bits,
        ngram=ngram,
        ngram_bits=ngram * nats_to_bits,
        uniform=uniform,
        uniform_bits=uniform * nats_to_bits,
    )
    write_directory(out, tokenizer, weights, readme)
    print(f"wrote {out}: validation {loss:.3f} nats a token, trigram {ngram:.3f}")


if __name__ == "__main__":
    typer.run(main)
