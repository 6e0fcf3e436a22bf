"""Compares Quire with llama.cpp on the same GGUF files: tiny models of each architecture, in float32.

python -m tests.model.gguf.beside_llama_cpp LLAMA_PYTHON

LLAMA_PYTHON is the Python of an environment with llama-cpp-python, which takes 10 minutes to compile. Tests do without
it. The files are those that tests/model/gguf writes; what is compared are the logits after each token of a text.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Kind

from scheduler.settings import SchedulerSettings
from tests.model.families.cases import Case
from tests.model.families.conftest import Shelf
from tests.model.gguf.kinds import all_in
from tests.model.gguf.metadata import first_of
from tests.model.gguf.test_models import CASES, with_values
from tests.model.gguf.writer import Conversion
from tests.support.engines import make_request, make_rig

TEXT = [5, 9, 200, 31, 7, 88, 14, 3, 250, 61, 77, 12, 9, 5, 200, 31, 60, 61]
NEAR, NEAR_WITH_GELU = 3e-4, 0.03  # llama.cpp looks GELU up in a table of 16 bits
NOT_LOADED = 3  # exit code of `llama_cpp_logits`
EPS = {"rms_norm_eps": 1e-6}
"""llama.cpp has one epsilon for all norms of a model, and for those without weights. So have published models."""
CHANGED = {
    "deepseek-v2": with_values(
        "deepseek-v2", q_lora_rank=32, n_group=1, topk_group=1, topk_method="greedy", **EPS
    ),  # llama.cpp chooses groups as DeepSeek-V3 does
    "deepseek-v3": with_values("deepseek-v3", q_lora_rank=32, **EPS),
    "kimi-linear-plain": replace(CASES["kimi-linear-plain"], changes={**CASES["kimi-linear-plain"].changes, **EPS}),
    "qwen3-next": with_values("qwen3-next", norm_topk_prob=True, mlp_only_layers=[], **EPS),
    "qwen3.5": with_values("qwen3.5", linear_key_head_dim=32, linear_value_head_dim=32, **EPS),
    "qwen3.5-moe": with_values("qwen3.5-moe", linear_key_head_dim=32, linear_value_head_dim=32, **EPS),
    "gpt-oss": with_values("gpt-oss", swiglu_limit=7.0, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "gemma4-moe": replace(CASES["gemma4-moe"], gain=3.0),  # a larger one makes much of the table's rounding
}
OTHERWISE = {
    "exaone4": "it has windows for models of 64 layers alone",
    "phi3": "it has no windows for Phi 3",
    "phi3-longrope": "its factors go by the length of its context",
    "phimoe": "it has neither the band of the experts' choice nor the factor of angles",
}
"""Cases that llama.cpp computes otherwise, as docs/reference/weights.md says."""
UNREADABLE = {
    "cohere-qk-norm", "ernie4.5-moe", "ernie4.5-moe-biases", "falcon-h1-normed", "gpt-neox-sequential",
    "gpt-oss-limit", "granite-hybrid-dense", "kimi-linear", "lfm2-biases", "llama4-dense", "mamba2-biases",
    "minimax-m2-wide", "nemotron-h-moe", "phimoe-window", "qwen3.5-wide", "starcoder2-plain",
}  # fmt: skip
"""Cases that llama.cpp does not load: it knows these architectures with or without biases, as they are published."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="Python with llama-cpp-python")
    python, bad = parser.parse_args().python, 0
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        shelf = Shelf(place / "checkpoints")
        for name, case in CASES.items():
            said, good = compare(name, CHANGED.get(name, case), shelf, place, python)
            bad += not good
            print(f"{name:24} {said}", flush=True)
    sys.exit(f"{bad} differ" if bad else None)


def compare(name: str, case: Case, shelf: Shelf, place: Path, python: str) -> tuple[str, bool]:
    """Returns what came out, and whether the two agree or may differ."""
    model, ids, logits = (place / f"{name}.{end}" for end in ("gguf", "ids.npy", "logits.npy"))
    made = Conversion(shelf.checkpoint(case), all_in(Kind.F32))
    made.write(model)
    activation = first_of(made.config, "hidden_act", "hidden_activation", "activation_function") or "gelu"
    rig = make_rig(model, 16, 2048, SchedulerSettings(), True, dtype="float32", backend="reference")
    rig.run({0: make_request(rig, TEXT, 12)})
    found = [np.frombuffer(row, np.float32) for _, row in sorted(rig.logits_of(0).items())]
    np.save(ids, np.array([*TEXT, *rig.results[0].tokens[: len(found) - 1]]))
    child = Path(__file__).with_name("llama_cpp_logits.py")
    done = subprocess.run([python, child, model, ids, logits], capture_output=True, text=True, check=False)
    if done.returncode == NOT_LOADED:
        why = next((line for line in done.stderr.splitlines() if "error loading" in line), "no reason given")
        return f"not loaded: {why.rpartition('error loading model: ')[2]}", name in UNREADABLE
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    theirs = np.load(logits)[len(TEXT) - 1 :]
    apart = float(np.abs(np.stack(found) - theirs).max())
    same = sum(int(a.argmax() == b.argmax()) for a, b in zip(found, theirs, strict=True))
    said = f"{apart:.1e} apart, {same} of {len(found)} tokens alike"
    if apart < (NEAR_WITH_GELU if "gelu" in activation else NEAR):
        return said, True
    return f"{said}: {OTHERWISE.get(name, 'NOT EXPLAINED')}", name in OTHERWISE


if __name__ == "__main__":
    main()
