"""Opens mutated checkpoints, each in a process with limits: `python -m tests.model.hostile BASE FIRST COUNT`.

BASE: a small valid checkpoint. Seeds FIRST to FIRST + COUNT - 1 each change it in one to three ways. Prints a line of
JSON for each: `seed`, `changes`, `outcome` (served, or the name of an exception, or how the process ended), `message`.
"""

import json
import math
import os
import random
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY = 4 * 2**30  # bytes of address space, of which torch takes one
SECONDS = 30  # of processor time
WAIT = 120.0

EXTREMES: list[Any] = [
    0, 1, -1, 3, 2**16, 2**20, 2**22, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**400, -(2**63), -(10**400),
    1e-320, 1e-30, 0.5, 1e30, 1e308, math.inf, -math.inf, math.nan, True, False, None,
    "", "x", "x" * 1_000_000, "\ud800\x1b[2J\0", "\u00e9\u4e2d\n", "../../etc/passwd", "float16", "[" * 1000,
    [], [1], [[]], [2**64], [None] * 1000, list(range(5000)), ["x" * 100_000], {}, {"x": 1}, {"x" * 100_000: {}},
]  # fmt: skip

FAMILIES: list[dict[str, Any]] = [
    {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
    {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [0]},
    {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 16, "sliding_window_pattern": 2},
    {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 64,
     "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
    {"architectures": ["Qwen3ForCausalLM"], "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}},
    {"architectures": ["LlamaForCausalLM"], "rope_scaling": {
        "type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0}},
    {"architectures": ["FalconForCausalLM"], "new_decoder_architecture": True, "num_kv_heads": 2},
    {"architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.25},
    {"architectures": ["OPTForCausalLM"], "ffn_dim": 96, "word_embed_proj_dim": 32},
    {"architectures": ["GPT2LMHeadModel"], "n_inner": 96},
    {"architectures": ["LlavaForConditionalGeneration"], "image_token_index": 5, "vision_feature_layer": -2,
     "text_config": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96},
     "vision_config": {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64,
                       "image_size": 32, "patch_size": 8}},
    {"architectures": ["Idefics3ForConditionalGeneration"], "image_token_id": 5, "scale_factor": 2,
     "text_config": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96},
     "vision_config": {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64,
                       "image_size": 32, "patch_size": 8}},
    {"architectures": None, "vit_hidden_dim": 32, "vit_inter_dim": 64, "vit_n_blocks": 2, "vit_n_heads": 2,
     "vit_img_size": 32, "vit_patch_size": 8, "vit_ln_eps": 1e-6, "lm_hidden_dim": 64, "lm_inter_dim": 96,
     "lm_n_blocks": 2, "lm_n_heads": 4, "lm_n_kv_heads": 2, "lm_vocab_size": 320, "lm_rms_eps": 1e-5,
     "lm_re_base": 10000, "lm_max_position_embeddings": 256, "mp_pixel_shuffle_factor": 2,
     "vlm_extra_tokens": {"image_token": "<|end|>"}, "max_img_size": 64},
]  # fmt: skip

EXTRA: dict[str, Any] = {
    "generation_config.json": {
        "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1,
        "eos_token_id": [0],
    },
    "tokenizer_config.json": {
        "bos_token": "<|end|>", "eos_token": {"content": "<|end|>"}, "chat_template": "{{ messages }}",
        "added_tokens_decoder": {"0": {"content": "<|end|>"}}, "additional_special_tokens": ["<|end|>"],
    },
    "special_tokens_map.json": {"bos_token": "<|end|>"},
    "added_tokens.json": {"<|end|>": 0},
    "preprocessor_config.json": {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32}, "crop_size": 32, "resample": 3,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "rescale_factor": 0.00392,
        "max_image_size": {"longest_edge": 32}, "do_center_crop": True,
    },
}  # fmt: skip

TEMPLATES = [
    "{% for i in range(10**9) %}{% endfor %}{{ messages }}", "{{ 'a' * 10**10 }}", "{% if %}", "{{" * 10_000,
    "{{ raise_exception('x' * 10**6) }}", "\0", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
]  # fmt: skip


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in a JSON value; of long lists and objects the first few."""
    found = [path]
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(inner)[:40]:
        found += places(value, (*path, key))
    return found


def replaced(root: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The JSON value with another one in this place."""
    if not path:
        return value
    copy = dict(root) if isinstance(root, dict) else list(root)
    copy[path[0]] = replaced(root[path[0]], path[1:], value)
    return copy


def change_json(chance: random.Random, path: Path, start: dict[str, Any] | None = None) -> str:
    """Puts extremes in one to three places."""
    values = json.loads(path.read_text()) if start is None else start
    said = []
    for _ in range(chance.choice([1, 1, 2, 3])):
        place = chance.choice(places(values)[1:] or [()])
        extreme = chance.choice(EXTREMES)
        values = replaced(values, place, extreme)
        said.append(f"{'.'.join(map(str, place))[:60]} = {str(extreme)[:30]!r}")
    text = json.dumps(values)
    if chance.random() < 0.05:
        text = text.replace("{", '{"deep": ' + "[" * 100_000 + "]" * 100_000 + ", ", 1)
        said.append("deep")
    path.unlink(missing_ok=True)
    path.write_text(text)
    return f"{path.name}: {', '.join(said)}"


def change_config(chance: random.Random, directory: Path) -> str:
    return change_json(chance, directory / "config.json")


def change_family(chance: random.Random, directory: Path) -> str:
    """Another architecture: no weights of it are there, but all of its numbers are read."""
    values = json.loads((directory / "config.json").read_text()) | chance.choice(FAMILIES)
    extra = EXTRA["preprocessor_config.json"]
    (directory / "preprocessor_config.json").write_text(json.dumps(extra))
    return change_json(chance, directory / "config.json", values)


def change_extra(chance: random.Random, directory: Path) -> str:
    name = chance.choice(list(EXTRA))
    return change_json(chance, directory / name, EXTRA[name])


def change_vision(chance: random.Random, directory: Path) -> str:
    """A vision-language model with the sound numbers and a mutated processor."""
    values = json.loads((directory / "config.json").read_text()) | chance.choice(FAMILIES[-3:])
    (directory / "config.json").write_text(json.dumps(values))
    name = "preprocessor_config.json"
    return change_json(chance, directory / name, EXTRA[name])


def change_tokenizer(chance: random.Random, directory: Path) -> str:
    return change_json(chance, directory / "tokenizer.json")


def change_template(chance: random.Random, directory: Path) -> str:
    template = chance.choice(TEMPLATES)
    (directory / "chat_template.jinja").write_text(template)
    return f"template {template[:40]!r}"


def change_file(chance: random.Random, directory: Path) -> str:
    """Replaces a path's content by another file, or by what is no file."""
    path = chance.choice([*(directory / name for name in (*EXTRA, "chat_template.jinja")), *directory.iterdir()])
    content = path.read_bytes() if path.is_file() else b"{}"
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    kind = chance.choice(["pipe", "zero", "directory", "loop", "socket", "cut", "empty", "flipped", "sparse", "mem"])
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "zero":
            path.symlink_to("/dev/zero")
        case "mem":
            path.symlink_to("/proc/self/mem")
        case "directory":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(path))
        case "cut":
            path.write_bytes(content[: chance.randrange(len(content) + 1)])
        case "empty":
            path.write_bytes(b"")
        case "flipped":
            changed = bytearray(content)
            for _ in range(chance.randint(1, 8)):
                changed[chance.randrange(min(len(changed), chance.choice([16, 2000, 10**9])))] = chance.randrange(256)
            path.write_bytes(changed)
        case "sparse":
            path.write_bytes(content)
            os.truncate(path, 2**31)
    return f"{path.name} {kind}"


CHANGES: list[Callable[[random.Random, Path], str]] = [
    change_config, change_config, change_family, change_family, change_extra, change_vision, change_tokenizer,
    change_template, change_file, change_file,
]  # fmt: skip


def mutate(seed: int, directory: Path) -> tuple[str, bool]:
    """Says what it changed, and whether the tokenizer may have changed."""
    chance = random.Random(seed)
    change = CHANGES[seed % len(CHANGES)]
    return change(chance, directory), change in (change_tokenizer, change_file)


def open_checkpoint(directory: Path, tries_tokenizer: bool) -> None:
    """All that a server does with a directory, up to a prompt's tokens."""
    from model.config import read_config
    from model.footprint import weight_bytes
    from model.inputs.trial import try_tokenizer
    from model.loading import load
    from model.settings import ModelSettings
    from rpc.frontend import prepare
    from rpc.paths import inputs_digest
    from scheduler.invalid import InvalidRequest
    from scheduler.settings import RequestLimits
    from scheduler.spec import Spec

    prepare.try_tokenizer = try_tokenizer if tries_tokenizer else lambda _: None
    settings = ModelSettings(str(directory), backend="reference", kv_cache_memory=2**26)
    inputs_digest(directory)
    weight_bytes(read_config(directory), "float32")
    preparer = prepare.load_preparer(settings)
    try:
        limits = load(directory, settings, 2, 16, RequestLimits()).limits
        for text in ("the cat sat", "caf\u00e9 \u4e2d\u6587 \U0001f642", ""):
            try:
                ids = preparer.prepare(Spec(text), limits).prompt
                preparer.detokenize(list(ids), False, "", limits)
            except (InvalidRequest, prepare.RequestFailed):
                pass  # an error with a name
    finally:
        preparer.close()


def outcome_of(directory: Path, tries_tokenizer: bool) -> tuple[str, str]:
    """Opens a checkpoint in a fork of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        said = ("served", "")
        try:
            open_checkpoint(directory, tries_tokenizer)
        except BaseException as error:
            said = type(error).__name__, str(error)
        os.write(writing, json.dumps(said).encode()[:60_000])
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], WAIT)
    data = os.read(reading, 2**16) if ready else b""
    os.close(reading)
    if not ready:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not data:
        return f"ended by {status}" if ready else "hung", ""
    outcome, message = json.loads(data)
    return outcome, message


def main() -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    base, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    open_checkpoint(base, tries_tokenizer=False)  # which imports all, so that forks need not
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place) / "m"
            shutil.copytree(base, directory)
            changes, tries_tokenizer = mutate(seed, directory)
            outcome, message = outcome_of(directory, tries_tokenizer)
        print(json.dumps({"seed": seed, "changes": changes, "outcome": outcome, "message": message}), flush=True)


if __name__ == "__main__":
    main()
